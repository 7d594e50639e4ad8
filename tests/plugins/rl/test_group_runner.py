"""Groups of attempts: order, retries, giving up, the budget of a run, the contract, and nothing left running."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_attempts import run
from scripted_groups import Prompt, answer, make_runner, one_token, run_and_leave_nothing

from spurline.errors import ConfigError, DataError, ModelError, PluginError, Problem, RunFailedError
from spurline.testing.fuzzing import fuzzing
from spurline_rl.chat_front import PrefixError
from spurline_rl.draws import SkippedRow
from spurline_rl.group_runner import GivenUpPrompt, GivenUpPrompts
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle, Task
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Group, Trajectory


def tokens(groups: list[Group | GivenUpPrompt]) -> list[Any]:
    return [
        [turn.response_ids.tolist() for trajectory in group.trajectories for turn in trajectory.turns]
        for group in groups
        if isinstance(group, Group)
    ]


def test_groups_and_samples_come_in_order_with_rewards_on_their_tokens():
    groups = run_and_leave_nothing(make_runner(), Prompt(4), Prompt(2))
    assert [(type(group), group.uid, group.draw) for group in groups] == [
        (Group, "train:4@4", 4),
        (Group, "train:2@2", 2),
    ]
    for group in groups:
        assert isinstance(group, Group)
        assert [(trajectory.uid, trajectory.sample) for trajectory in group.trajectories] == [
            (group.uid, sample) for sample in range(3)
        ]
        assert all(turn.rewards is not None for trajectory in group.trajectories for turn in trajectory.turns)


@given(
    prompts=st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True),
    samples=st.integers(1, 4),
    places=st.integers(1, 5),
)
@fuzzing(25)
def test_what_is_generated_does_not_depend_on_what_runs_beside_it(prompts, samples, places):
    together = make_runner(samples_per_prompt=samples, max_concurrent=places)
    groups = run(together.run_groups([Prompt(number) for number in prompts]))
    for number, group in zip(prompts, groups, strict=True):
        alone = run(make_runner(samples_per_prompt=samples).run_group(Prompt(number)))
        assert tokens([group]) == tokens([alone])


def test_a_failed_attempt_is_made_again_with_other_seeds(capsys):
    engine = ScriptedEngine(one_token)

    async def fails_twice(task: Task, policy: PolicyHandle) -> Trajectory:
        trajectory = await answer(task, policy)
        if sum(request.name.startswith(f"{task.uid} sample {task.sample} ") for request in engine.requests) < 3:
            raise ConnectionError("sandbox gone")
        return trajectory

    runner = make_runner(fails_twice, engine=engine, samples_per_prompt=1)
    [group] = run_and_leave_nothing(runner, Prompt(0))
    assert isinstance(group, Group)
    assert [runner.take_retries(group.uid) for _ in range(2)] == [2, 0], "told once"
    assert len({request.seed for request in engine.requests}) == 3
    assert [request.name for request in engine.requests][-1] == "train:0@0 sample 0 turn 0 attempt 2"
    assert len(group.trajectories[0].turns) == 1, "turns of failed attempts are gone"
    assert group.trajectories[0].retries == 2
    [told] = capsys.readouterr().err.splitlines()
    assert "rows.jsonl:1 (sample 0 of prompt train:0@0): ConnectionError: sandbox gone" in told, (
        "the first, while others go on"
    )


@pytest.mark.parametrize("of_run", [True, False])
def test_what_is_cancelled_is_waited_for_until_every_attempt_has_cleaned_up(of_run: bool):
    started, cleaned = asyncio.Event(), []

    async def cleans_up(task: Task, policy: PolicyHandle) -> Trajectory:
        try:
            if task.sample == 2:
                started.set()
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05 * task.sample)
            cleaned.append(task.sample)
        raise AssertionError("unreachable")

    async def observe() -> None:
        runner = make_runner(cleans_up)
        work = runner.run_groups([Prompt(0)]) if of_run else runner.run_group(Prompt(0))
        step = asyncio.ensure_future(work)
        await asyncio.wait_for(started.wait(), 30)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert cleaned == [0, 1, 2]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(observe())


async def _not_a_trajectory(task: Task, policy: PolicyHandle) -> Any:
    return 1.0


async def _anothers_trajectory(task: Task, policy: PolicyHandle) -> Any:
    return replace(await answer(task, policy), sample=7)


async def _no_turns(task: Task, policy: PolicyHandle) -> Any:
    return policy.finish({"length": 0.0})


async def _ragged(task: Task, policy: PolicyHandle) -> Any:
    trajectory = await answer(task, policy)
    return replace(trajectory, turns=(replace(trajectory.turns[0], rewards=[0.0, 0.0]),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("behaviour", "complaint"),
    [
        (_not_a_trajectory, "Scripted.run returned a float, not a Trajectory"),
        (_anothers_trajectory, "was given sample 0 of prompt train:0@0 and returned sample 7"),
        (_no_turns, "returned a trajectory without turns"),
        (_ragged, "turn 0 of sample 0 of prompt train:0@0 has 2 rewards for 1 response tokens"),
    ],
)
def test_an_environment_that_breaks_its_contract_ends_the_run(behaviour, complaint):
    runner = make_runner(behaviour, max_groups=10, samples_per_prompt=1)
    with pytest.raises(PluginError, match=complaint):
        run_and_leave_nothing(runner, Prompt(0))


def test_time_without_an_engine_does_not_count_against_an_attempt():
    async def waits_for_an_engine(task: Task, policy: PolicyHandle) -> Trajectory:
        await asyncio.sleep(0.4)
        return await answer(task, policy)

    def outcome(seconds_down: Callable[[], float]) -> Any:
        settings = {"attempt_timeout_s": 0.15, "samples_per_prompt": 1, "retries": 0, "max_groups": 1}
        runner = make_runner(waits_for_an_engine, seconds_down=seconds_down, **settings)
        return run_and_leave_nothing(runner, Prompt(0))[0]

    assert isinstance(outcome(time.monotonic), Group), "down all the time"
    assert isinstance(outcome(lambda: 0.0), GivenUpPrompt)


def test_what_is_shut_down_with_its_event_loop_is_not_made_again():
    started: list[int] = []

    async def waits(task: Task, policy: PolicyHandle) -> Trajectory:
        started.append(task.sample)
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    async def leave() -> None:
        group = asyncio.ensure_future(make_runner(waits, max_concurrent=2).run_group(Prompt(0)))
        while len(started) < 2:
            await asyncio.sleep(0)
        assert not group.done()

    asyncio.run(leave())
    assert started == [0, 1]


def test_groups_are_freed_without_the_garbage_collector():
    failed: set[tuple[str, int]] = set()

    async def fails_once(task: Task, policy: PolicyHandle) -> Trajectory:
        trajectory = await answer(task, policy)
        if task.sample == 1 and (task.uid, 1) not in failed:
            failed.add((task.uid, 1))
            return replace(trajectory, rewards={"length": float("nan")})
        return trajectory

    async def observe() -> list[weakref.ref[Any]]:
        runner = make_runner(fails_once, max_concurrent=2)
        groups = await runner.run_groups([Prompt(number) for number in range(4)])
        return [weakref.ref(trajectory) for group in groups for trajectory in group.trajectories]  # type: ignore[union-attr]

    gc.disable()
    try:
        left = [trajectory() for trajectory in asyncio.run(observe())]
    finally:
        gc.enable()
    assert [trajectory is None for trajectory in left] == [True] * 12


def test_after_the_last_retry_the_prompt_is_given_up_with_the_error_and_its_place():
    given_up = GivenUpPrompts(5)

    async def one_sample_fails(task: Task, policy: PolicyHandle) -> Trajectory:
        if task.uid == "train:1@1" and task.sample == 2:
            raise ConnectionError("sandbox gone")
        return await answer(task, policy)

    runner = make_runner(one_sample_fails, given_up=given_up)
    groups = run_and_leave_nothing(runner, Prompt(0), Prompt(1), Prompt(2))
    assert [type(group) for group in groups] == [Group, GivenUpPrompt, Group]
    assert given_up.prompts == (groups[1],)
    assert isinstance(groups[1], GivenUpPrompt)
    expected = "rows.jsonl:2 (sample 2 of prompt train:1@1, after 3 attempts): ConnectionError: sandbox gone ("
    assert groups[1].reason.startswith(expected)
    assert "test_group_runner.py" in groups[1].reason
    assert "in one_sample_fails" in groups[1].reason


def test_the_other_attempts_at_a_given_up_prompt_are_cancelled():
    cancelled: list[int] = []

    async def one_fails(task: Task, policy: PolicyHandle) -> Trajectory:
        if task.sample == 0:
            raise AttemptFailedError("the tool broke")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(task.sample)
            raise
        raise AssertionError("unreachable")

    [group] = run_and_leave_nothing(make_runner(one_fails, max_groups=1, retries=0), Prompt(0))
    assert isinstance(group, GivenUpPrompt)
    assert sorted(cancelled) == [1, 2]


async def refuses_row_1(task: Task, policy: PolicyHandle) -> Trajectory:
    if task.uid != "train:1@1":
        return await answer(task, policy)
    if task.sample == 0:
        raise DataError("messages is empty.")
    await asyncio.sleep(3600)
    raise AssertionError("unreachable")


def test_a_row_that_cannot_be_used_ends_the_run_with_its_location_and_the_way_out():
    given_up = GivenUpPrompts(0)
    runner = make_runner(refuses_row_1, given_up=given_up)
    with pytest.raises(DataError, match=r"^rows\.jsonl:2: messages is empty\. .*`on_bad_row: skip`"):
        run_and_leave_nothing(runner, Prompt(0), Prompt(1), Prompt(2))
    assert (runner.take_retries("train:1@1"), given_up.prompts) == (0, ())


def test_a_row_that_cannot_be_used_is_skipped_at_once_where_asked_for_and_costs_no_budget():
    given_up = GivenUpPrompts(0)
    runner = make_runner(refuses_row_1, given_up=given_up)
    outcomes = run_and_leave_nothing(runner, *(Prompt(number, on_bad_row="skip") for number in range(3)))
    assert [type(outcome) for outcome in outcomes] == [Group, SkippedRow, Group]
    skipped = outcomes[1]
    assert isinstance(skipped, SkippedRow)
    assert (skipped.uid, skipped.draw) == ("train:1@1", 1)
    assert skipped.reason.startswith("rows.jsonl:2: messages is empty.")
    assert (runner.take_retries(skipped.uid), given_up.prompts) == (0, ())


def test_a_template_that_rewrites_history_is_not_the_rows_fault_and_is_given_up_without_a_retry():
    async def rewrites(task: Task, policy: PolicyHandle) -> Trajectory:
        raise PrefixError("rewritten")

    runner = make_runner(rewrites, max_groups=1)
    [group] = run_and_leave_nothing(runner, Prompt(0, on_bad_row="skip"))
    assert isinstance(group, GivenUpPrompt)
    assert runner.take_retries(group.uid) == 0


@pytest.mark.parametrize(
    "error",
    [
        ConfigError([Problem("source", "is wrong")]),
        PluginError("broken"),
        ModelError("no template"),
        RunFailedError("the engine died"),
    ],
)
def test_errors_that_are_not_about_an_attempt_end_the_run_at_once(error):
    async def wrong(task: Task, policy: PolicyHandle) -> Trajectory:
        if task.sample == 1:
            raise error
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    with pytest.raises(type(error), match=str(error)):
        run_and_leave_nothing(make_runner(wrong, max_groups=10), Prompt(0), Prompt(1))


def test_an_error_that_cannot_be_told_ends_the_run_instead_of_leaving_it_waiting():
    class WithoutTextError(Exception):
        def __str__(self) -> str:
            raise LookupError("no text")

    async def wrong(task: Task, policy: PolicyHandle) -> Trajectory:
        raise WithoutTextError

    with pytest.raises(LookupError, match="no text"):
        run_and_leave_nothing(make_runner(wrong), Prompt(0))


async def hangs(task: Task, policy: PolicyHandle) -> Trajectory:
    await asyncio.sleep(3600)
    raise AssertionError("unreachable")


async def gives_itself_up(task: Task, policy: PolicyHandle) -> Trajectory:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("behaviour", "ended"), [(hangs, "did not end within 0.05 s"), (gives_itself_up, "was cancelled by its own code")]
)
def test_an_attempt_that_takes_too_long_or_cancels_itself_is_retried_and_then_given_up(behaviour, ended):
    runner = make_runner(behaviour, max_groups=1, attempt_timeout_s=0.05, samples_per_prompt=1, retries=1)
    [group] = run_and_leave_nothing(runner, Prompt(0))
    assert isinstance(group, GivenUpPrompt)
    assert f"Scripted.run for sample 0 of prompt train:0@0 {ended}" in group.reason
    assert runner.take_retries(group.uid) == 1


@pytest.mark.parametrize("differ", [True, False])
def test_over_the_budget_the_run_ends_and_lists_the_first_reasons_each_once(differ):
    async def fails(task: Task, policy: PolicyHandle) -> Trajectory:
        raise AttemptFailedError(f"tool {task.uid} broke" if differ else "no server")

    runner = make_runner(fails, max_groups=6, samples_per_prompt=1, retries=0, max_concurrent=1)
    with pytest.raises(RunFailedError) as caught:
        run_and_leave_nothing(runner, *(Prompt(number) for number in range(10)))
    message = str(caught.value)
    assert message.startswith("7 prompts had to be given up, more than source.faults.max_quarantined: 6.")
    lines = message.splitlines()[1:]
    why = "tool train:0@0 broke" if differ else "no server"
    assert lines[0] == f"- rows.jsonl:1 (sample 0 of prompt train:0@0): {why}"
    assert len(lines) == (6 if differ else 2)
    assert lines[-1] == ("- and 2 more" if differ else "- and 6 more")


def test_the_budget_counts_each_row_once_and_goes_on_after_a_resume():
    before = GivenUpPrompts(1)
    before.add(GivenUpPrompt("train:0@0", 0, "first"))
    after = GivenUpPrompts(1)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.prompts == before.prompts
    for draw in (8, 16):
        after.add(GivenUpPrompt(f"train:0@{draw}", draw, "again, in a later epoch"))
    with pytest.raises(RunFailedError, match=r"2 prompts had to be given up(.|\n)*- first\n- second"):
        after.add(GivenUpPrompt("other:4@30", 30, "second"))
