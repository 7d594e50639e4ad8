"""Core's own rewards and sources, and the asynchronous one, run through the suites that plugin authors subclass."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from reward_functions import in_process

from spurline.data.batch import TrainingBatch
from spurline_models.testing import SourceContract
from spurline_rl.protocols.reward import Answer, Reward
from spurline_rl.rewards.configs import ExactMatchConfig, FunctionRewardConfig, MathVerifyConfig, PrefixMatchConfig
from spurline_rl.rewards.function import FunctionReward
from spurline_rl.rewards.matching import ExactMatch, PrefixMatch
from spurline_rl.rewards.math_verify import MathVerify
from spurline_rl.testing import RewardContract
from spurline_text.sources.sft import SftSource


class TestExactMatch(RewardContract):
    def make_reward(self) -> ExactMatch:
        return ExactMatch(ExactMatchConfig())


class TestPrefixMatch(RewardContract):
    def make_reward(self) -> PrefixMatch:
        return PrefixMatch(PrefixMatchConfig())


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


class Broken(RewardContract):
    """Not collected by itself: what the suite of rewards finds wrong."""

    made: Reward

    def make_reward(self) -> Reward:
        return self.made


class Remembers:
    """Another score for each call, and a mark on the row."""

    def __init__(self) -> None:
        self.calls = 0

    def score(self, answer: Answer) -> float:
        self.calls += 1
        answer.row["seen"] = self.calls  # type: ignore[index]
        return float(self.calls)


class NeedsReference:
    def score(self, answer: Answer) -> float:
        return float(answer.response == answer.reference.strip())  # type: ignore[union-attr]


class NoNumber:
    def score(self, answer: Answer) -> Any:
        return "good"


@pytest.mark.parametrize(
    ("reward", "test", "error"),
    [
        (Remembers(), "test_equal_answers_have_equal_scores", AssertionError),
        (Remembers(), "test_it_changes_nothing_of_an_answer_or_its_row", AssertionError),
        (Remembers(), "test_many_callers_at_the_same_time_get_their_own_scores", AssertionError),
        (NeedsReference(), "test_an_answer_without_reference_is_scored_or_is_an_error_of_the_data", AssertionError),
        (NoNumber(), "test_every_answer_gets_a_finite_number", Exception),
    ],
)
def test_the_suite_of_rewards_finds_what_is_wrong(reward: Any, test: str, error: type[Exception]) -> None:
    suite = Broken()
    with pytest.raises(error):
        getattr(suite, test)(reward)


def forgets_the_step(source: SftSource, step: int) -> TrainingBatch:
    return BUILD(source, 1)


def counts_calls(source: SftSource, step: int) -> TrainingBatch:
    CALLS.append(step)
    return BUILD(source, len(CALLS))


def counts_quietly(source: Any, step: int) -> TrainingBatch:
    """Claims to be pure, and keeps a number that the batches do not show yet."""
    source.seen = getattr(source, "seen", 0) + 1
    return BUILD(source, step)


def state_with_seen(source: Any) -> dict[str, object]:
    return {**STATE(source), "seen": getattr(source, "seen", 0)}


def learns_nothing(source: SftSource, step: int) -> TrainingBatch:
    batch = BUILD(source, step)
    return batch.with_tokens(loss_weights=torch.zeros_like(batch.tokens["loss_weights"]))


BUILD = SftSource.build
STATE = SftSource.state_dict
CALLS: list[int] = []


class TestSftOfTwoFiles(SourceContract):
    source_settings: ClassVar[dict[str, Any]] = {"name": "sft"}
    run_settings: ClassVar[dict[str, Any]] = {"batch_size": 6}

    def data(self, folder: Path, word: str = "say") -> dict[str, Any]:
        paths = [folder / "one.jsonl", folder / "two.jsonl"]
        for path in paths:
            rows = self.rows(f"{word} {path.stem}")
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return {"train": [{"path": str(path), "weight": 0.5} for path in paths]}


class TestWhatTheSuiteOfSourcesFinds:
    config, train, data = TestSft.config, TestSft.train, SourceContract.data
    rows, plugins, source_settings, run_settings = SourceContract.rows, (), {"name": "sft"}, {"batch_size": 6}

    @pytest.mark.parametrize(
        ("build", "name"),
        [
            (forgets_the_step, "test_the_batches_of_different_steps_differ"),
            (counts_calls, "test_a_pure_source_builds_the_batch_of_a_step_whenever_it_is_asked"),
            (counts_calls, "test_a_resumed_run_goes_on_with_the_next_batch"),
            (learns_nothing, "test_each_step_has_a_batch_with_something_to_learn"),
        ],
    )
    def test_a_broken_source_is_found(
        self,
        build: Any,
        name: str,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        CALLS.clear()
        monkeypatch.setattr(SftSource, "build", build)
        test = getattr(TestSft(), name)
        needed = {found: request.getfixturevalue(found) for found in inspect.signature(test).parameters}
        with pytest.raises((AssertionError, RuntimeError, ZeroDivisionError)):
            test(**needed)

    def test_a_source_that_says_it_is_pure_and_whose_state_changes_by_building_is_found(
        self, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(SftSource, "build", counts_quietly)
        monkeypatch.setattr(SftSource, "state_dict", state_with_seen)
        with pytest.raises(AssertionError, match=r"Set `self\.pure = False`"):
            TestSft().test_a_pure_source_builds_the_batch_of_a_step_whenever_it_is_asked(config)
