"""What happens to attempts that fail: which are retried, which are given up, which end the run, and the budget."""

from __future__ import annotations

import asyncio
import json

import pytest
from scripted_groups import Prompt, answer, make_runner, run_and_leave_nothing

from spurline.errors import ConfigError, DataError, ModelError, PluginError, Problem, RunFailedError
from spurline_rl.chat_front import PrefixError
from spurline_rl.draws import SkippedRow
from spurline_rl.group_runner import GivenUpPrompt, GivenUpPrompts
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle, Task
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Group, Trajectory


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
    assert "test_given_up.py" in groups[1].reason
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
    expected = r"^rows\.jsonl:2: messages is empty\. Mend the row, or leave such rows out with `on_bad_row: skip`\.$"
    with pytest.raises(DataError, match=expected):
        run_and_leave_nothing(runner, Prompt(0), Prompt(1), Prompt(2))
    assert (runner.take_retries("train:1@1"), given_up.prompts) == (0, ())


def test_a_location_and_a_way_out_that_an_error_names_itself_are_not_said_twice():
    async def refuses(task: Task, policy: PolicyHandle) -> Trajectory:
        raise DataError("rows.jsonl:1: is null. Give it a value, or set `on_bad_row: skip`.")

    with pytest.raises(DataError, match=r"^rows\.jsonl:1: is null\. Give it a value, or set `on_bad_row: skip`\.$"):
        run_and_leave_nothing(make_runner(refuses), Prompt(0))


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
        raise PrefixError("rewritten", turn=0)

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


def test_a_weight_for_an_unknown_term_ends_the_run_at_once():
    with pytest.raises(ConfigError, match=r"source\.reward_weights\.lenght .* Did you mean 'length'"):
        run_and_leave_nothing(make_runner(weights={"lenght": 1.0}), Prompt(0))


def test_an_attempt_that_writes_nothing_is_a_failed_attempt():
    runner = make_runner(engine=ScriptedEngine(lambda request: []), max_groups=1)
    [group] = run_and_leave_nothing(runner, Prompt(0))
    assert isinstance(group, GivenUpPrompt)
    assert "has no response token" in group.reason


def test_an_attempt_that_takes_too_long_is_retried_and_then_given_up():
    starts: list[int] = []

    async def hangs(task: Task, policy: PolicyHandle) -> Trajectory:
        starts.append(task.sample)
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    runner = make_runner(hangs, max_groups=1, attempt_timeout_s=0.05, samples_per_prompt=1, retries=1)
    [group] = run_and_leave_nothing(runner, Prompt(0))
    assert isinstance(group, GivenUpPrompt)
    assert starts == [0, 0]
    assert "Scripted.run for sample 0 of prompt train:0@0 did not end within 0.05 s" in group.reason


def test_an_attempt_whose_own_code_cancels_it_is_a_failed_attempt_and_does_not_end_the_run():
    async def gives_itself_up(task: Task, policy: PolicyHandle) -> Trajectory:
        raise asyncio.CancelledError

    runner = make_runner(gives_itself_up, max_groups=1, samples_per_prompt=1)
    [group] = run_and_leave_nothing(runner, Prompt(0))
    assert isinstance(group, GivenUpPrompt)
    assert "Scripted.run for sample 0 of prompt train:0@0 was cancelled from within" in group.reason
    assert runner.take_retries(group.uid) == 2


def test_over_the_budget_the_run_ends_and_lists_the_first_reasons():
    async def fails(task: Task, policy: PolicyHandle) -> Trajectory:
        raise AttemptFailedError(f"tool {task.uid} broke")

    runner = make_runner(fails, max_groups=6, samples_per_prompt=1, retries=0, max_concurrent=1)
    with pytest.raises(RunFailedError) as caught:
        run_and_leave_nothing(runner, *(Prompt(number) for number in range(10)))
    message = str(caught.value)
    assert message.startswith("7 prompts had to be given up, over source.faults.max_quarantined: 6. Correct what fails")
    lines = message.splitlines()[1:]
    assert lines[0] == "- rows.jsonl:1 (sample 0 of prompt train:0@0): tool train:0@0 broke"
    assert len(lines) == 6
    assert lines[-1] == "- and 2 more"


def test_a_row_that_fails_in_every_epoch_counts_once():
    given_up = GivenUpPrompts(1)
    for epoch in range(3):
        given_up.add(GivenUpPrompt(f"train:4@{4 + 8 * epoch}", 4 + 8 * epoch, f"in epoch {epoch}"))
    assert [group.reason for group in given_up.prompts] == ["in epoch 0"]
    with pytest.raises(RunFailedError, match=r"2 prompts had to be given up"):
        given_up.add(GivenUpPrompt("other:4@30", 30, "another dataset"))


def test_the_budget_counts_over_a_resume():
    before = GivenUpPrompts(1)
    before.add(GivenUpPrompt("train:0@0", 0, "first"))
    state = json.loads(json.dumps(before.state_dict()))
    after = GivenUpPrompts(1)
    after.load_state_dict(state)
    assert after.prompts == before.prompts
    after.add(GivenUpPrompt("train:0@8", 8, "again"))
    with pytest.raises(RunFailedError, match=r"2 prompts had to be given up(.|\n)*- first\n- second"):
        after.add(GivenUpPrompt("train:1@1", 1, "second"))
