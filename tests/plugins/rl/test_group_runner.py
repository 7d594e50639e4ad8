"""Groups of attempts: order, retries, concurrency, contract, and nothing left running."""

from __future__ import annotations

import asyncio
import gc
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

from spurline.errors import PluginError, RunFailedError
from spurline.testing.fuzzing import fuzzing
from spurline_rl import concurrency as task_ends
from spurline_rl.group_runner import GivenUpPrompt
from spurline_rl.protocols.environment import PolicyHandle, Task
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


def test_no_more_attempts_run_at_a_time_than_allowed():
    running: set[tuple[str, int]] = set()
    most = 0

    async def counted(task: Task, policy: PolicyHandle) -> Trajectory:
        nonlocal most
        running.add((task.uid, task.sample))
        most = max(most, len(running))
        await asyncio.sleep(0)
        trajectory = await answer(task, policy)
        running.remove((task.uid, task.sample))
        return trajectory

    run(make_runner(counted, max_concurrent=4).run_groups([Prompt(number) for number in range(5)]))
    assert most == 4


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


def test_time_spent_waiting_for_a_place_does_not_count():
    async def slow(task: Task, policy: PolicyHandle) -> Trajectory:
        await asyncio.sleep(0.15)
        return await answer(task, policy)

    runner = make_runner(slow, attempt_timeout_s=1.0, max_concurrent=1, samples_per_prompt=4, retries=0)
    # Twelve attempts one after the other: the limit holds for each, not for all.
    groups = run(runner.run_groups([Prompt(number) for number in range(3)]))
    assert all(isinstance(group, Group) for group in groups)


def test_an_environment_that_does_not_let_itself_be_cancelled_is_reported(monkeypatch):
    monkeypatch.setattr(task_ends, "CANCEL_TIMEOUT_S", 0.05)
    stop = asyncio.Event()

    async def stubborn(task: Task, policy: PolicyHandle) -> Trajectory:
        while not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), 60)
            except asyncio.CancelledError:
                continue
        return await answer(task, policy)

    async def observe() -> str:
        runner = make_runner(stubborn, attempt_timeout_s=0.05, samples_per_prompt=1)
        with pytest.raises(RunFailedError) as caught:
            await runner.run_group(Prompt(0))
        stop.set()
        return str(caught.value)

    message = run(observe())
    assert "Scripted.run for sample 0 of prompt train:0@0 was cancelled, but still runs 0.05 s later" in message


def test_cancelling_the_run_leaves_nothing_running():
    started = asyncio.Event()

    async def waits(task: Task, policy: PolicyHandle) -> Trajectory:
        started.set()
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    async def observe() -> None:
        step = asyncio.ensure_future(make_runner(waits).run_groups([Prompt(0), Prompt(1)]))
        await asyncio.wait_for(started.wait(), 30)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
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


class SpeechlessError(Exception):
    """As of many libraries: its text is made of arguments that it was not given."""

    def __str__(self) -> str:
        return self.args[3]


def test_an_error_that_cannot_say_what_it_is_gives_its_prompt_up_like_any_other():
    async def fails(task: Task, policy: PolicyHandle) -> Trajectory:
        raise SpeechlessError

    async def observe() -> list[Any]:
        runner = make_runner(fails, samples_per_prompt=2, retries=1, max_groups=1)
        return await asyncio.wait_for(runner.run_groups([Prompt(0)]), 10)

    [lost] = run(observe())
    assert isinstance(lost, GivenUpPrompt)
    assert "SpeechlessError: its text cannot be had, IndexError" in lost.reason
    assert f"({__file__}:" in lost.reason
