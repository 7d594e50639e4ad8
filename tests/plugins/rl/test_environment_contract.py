"""The contract suite of environments fails for environments that break it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spurline_rl.protocols.environment import Environment, PolicyHandle, Task
from spurline_rl.testing.environment_contract import EnvironmentContract as Contract
from spurline_rl.trajectory import Trajectory


class _Plain:
    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        result = await policy.generate([7, task.sample + 3])
        return policy.finish({"length": float(len(result.token_ids))})


class _KeepsState(_Plain):
    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        self.task = task
        trajectory = await super().run(task, policy)
        return replace(trajectory, sample=self.task.sample)


class _SwallowsErrors(_Plain):
    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        try:
            return await super().run(task, policy)
        except Exception:  # noqa: BLE001 - the fault that the contract must find
            return policy.finish({"length": 0.0})


class _GivesNoReward(_Plain):
    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        return replace(await super().run(task, policy), rewards={})


class _RewritesPrompts(_Plain):
    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        trajectory = await super().run(task, policy)
        return replace(trajectory, turns=(replace(trajectory.turns[0], prompt_ids=[1, 1]),))  # type: ignore[arg-type]


class _TokenizesAgain(_Plain):
    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        trajectory = await super().run(task, policy)
        [turn] = trajectory.turns
        return replace(trajectory, turns=(replace(turn, response_ids=turn.response_ids[::-1]),))


class _GivesTermsNowAndThen(_Plain):
    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        trajectory = await super().run(task, policy)
        return replace(trajectory, rewards={"length" if task.sample % 2 else "size": 1.0})


class _SaysWhatIsNoJson(_Plain):
    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        return replace(await super().run(task, policy), info={"task": task})


class _GoesOnWhenCancelled(_Plain):
    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        try:
            return await super().run(task, policy)
        except BaseException:  # noqa: BLE001 - the fault that the contract must find
            return policy.finish({"length": 0.0})


def contract_of(environment: type[_Plain]) -> Contract:
    class Suite(Contract):
        def make_environment(self, tokenizer: Any) -> Environment:
            return environment()

    return Suite()


TESTS = [name for name in vars(Contract) if name.startswith("test_")]


@pytest.mark.parametrize("test", TESTS)
def test_a_plain_environment_passes(test):
    getattr(contract_of(_Plain), test)()


@pytest.mark.parametrize(
    ("environment", "test"),
    [
        (_RewritesPrompts, "test_a_trajectory_belongs_to_its_task_and_keeps_what_the_engine_wrote"),
        (_TokenizesAgain, "test_a_trajectory_belongs_to_its_task_and_keeps_what_the_engine_wrote"),
        (_GivesNoReward, "test_it_gives_finite_rewards"),
        (_GivesTermsNowAndThen, "test_every_attempt_gives_the_same_reward_terms"),
        (_SaysWhatIsNoJson, "test_what_it_says_about_an_attempt_can_be_written_as_json"),
        (_KeepsState, "test_attempts_at_the_same_time_do_not_touch_each_other"),
        (_SwallowsErrors, "test_an_error_of_the_engine_is_not_swallowed"),
        (_GoesOnWhenCancelled, "test_a_cancelled_attempt_ends"),
    ],
)
def test_an_environment_that_breaks_the_contract_fails(environment, test):
    with pytest.raises((AssertionError, TypeError, pytest.fail.Exception)):
        getattr(contract_of(environment), test)()
