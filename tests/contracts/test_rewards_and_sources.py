"""Core's own rewards and sources, and the asynchronous one, run through the suites that plugin authors subclass."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from reward_functions import in_process

from spurline_models.testing import SourceContract
from spurline_rl.rewards.configs import ExactMatchConfig, FunctionRewardConfig, MathVerifyConfig
from spurline_rl.rewards.function import FunctionReward
from spurline_rl.rewards.matching import ExactMatch
from spurline_rl.rewards.math_verify import MathVerify
from spurline_rl.testing import RewardContract


class TestExactMatch(RewardContract):
    def make_reward(self) -> ExactMatch:
        return ExactMatch(ExactMatchConfig())


@pytest.mark.processes
class TestFunction(RewardContract):
    def make_reward(self) -> FunctionReward:
        return FunctionReward(FunctionRewardConfig(path="reward_functions:length", workers=2))


@pytest.mark.processes
class TestAsyncFunction(RewardContract):
    def make_reward(self) -> FunctionReward:
        return FunctionReward(FunctionRewardConfig(path="reward_functions:length_later"))


class TestFunctionInProcess(RewardContract):
    def make_reward(self) -> FunctionReward:
        return FunctionReward(FunctionRewardConfig(path="reward_functions:length", in_process=True))


@pytest.mark.processes
class TestMathVerify(RewardContract):
    def make_reward(self) -> MathVerify:
        pytest.importorskip("math_verify")
        return MathVerify(MathVerifyConfig(timeout_s=60.0, workers=2))


class TestSft(SourceContract):
    source_settings: ClassVar[dict[str, Any]] = {"name": "sft"}
    run_settings: ClassVar[dict[str, Any]] = {"batch_size": 6}


class TestPreference(SourceContract):
    source_settings: ClassVar[dict[str, Any]] = {"name": "preference"}
    run_settings: ClassVar[dict[str, Any]] = {"batch_size": 4}

    def rows(self, word: str = "say") -> list[dict[str, Any]]:
        return [
            {
                "prompt": [{"role": "user", "content": f"{word} {number}"}],
                "chosen": [{"role": "assistant", "content": str(number)}],
                "rejected": [{"role": "assistant", "content": "never"}],
            }
            for number in range(24)
        ]


class TestLabels(SourceContract):
    source_settings: ClassVar[dict[str, Any]] = {"name": "labels", "reference": "precompute"}
    run_settings: ClassVar[dict[str, Any]] = {"batch_size": 4}

    def rows(self, word: str = "say") -> list[dict[str, Any]]:
        return [
            {"prompt": f"{word} {number}:", "completion": f" {number}", "label": number % 3 > 0} for number in range(24)
        ]


ROLLOUTS: dict[str, Any] = {
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "environment": {"rewards": {"length": in_process("reward_functions:length")}},
    "sampling": {"max_new_tokens": 5},
}
OF_ROLLOUTS = {"minibatches": {"name": "by_prompt", "prompts_per_minibatch": 2}}


class TestRollouts(SourceContract):
    source_settings: ClassVar[dict[str, Any]] = {
        "name": "rollouts",
        "engine": {"name": "in_process", "deterministic": True},
        **ROLLOUTS,
    }
    run_settings: ClassVar[dict[str, Any]] = OF_ROLLOUTS


class TestAsyncRollouts(SourceContract):
    plugins = ("async_rl",)
    source_settings: ClassVar[dict[str, Any]] = {
        "name": "async_rollouts",
        "max_staleness": 0,
        "weight_sync": "in_process",
        "engine": {"name": "in_process", "deterministic": True},
        **ROLLOUTS,
    }
    run_settings: ClassVar[dict[str, Any]] = OF_ROLLOUTS
