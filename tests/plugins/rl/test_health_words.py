"""What is said of a step's numbers, and what is not."""

from __future__ import annotations

import pytest
from rl_run_record import rl_metrics

from spurline_insight.health import HealthWatch, health_words

ENGINE = [f"mismatch__worst_engine{end}" for end in ("", "__ratio", "__number")]


def test_nothing_is_said_of_a_healthy_step_and_of_steps_without_rollouts() -> None:
    assert health_words(rl_metrics(1)) == {}
    assert health_words({"step": 1, "loss": 0.0, "grad_norm": 9.0, "lr": 1e-4}) == {}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mismatch", {"mismatch__logprob_diff": 0.0712}, "differ by 0.071 nats"),
        ("mismatch", {"mismatch__logprob_diff": 0.3, "mismatch__fresh": 0.08, "staleness__mean": 1.0}, "by 0.080 nats"),
        ("engine_mismatch", dict(zip(ENGINE, (0.2, 8.0, 3.0), strict=True)), "Engine 3 generates with logprobs"),
        ("refill_missing", {"groups__refill_missing": 3.0}, "3 groups with equal rewards"),
        ("given_up", {"groups__quarantined": 2.0}, "2 prompts had to be given up"),
        ("large_update", {"policy__clip_fraction_low": 0.2, "policy__clip_fraction_high": 0.15}, "35% of tokens"),
        ("cut_off", {"response__share_length": 0.4}, "40% of responses were cut off"),
        ("failed_turns", {"response__share_abort": 0.04, "response__share_error": 0.03}, "7% of responses ended"),
        ("unparsed_calls", {"tools__unparsed": 0.07}, "7% of tool calls cannot be read"),
        ("rejected", {"correction__rejected": 0.5}, "leaves out 50% of tokens"),
        ("unknown_support", {"rollout__unknown_support": 0.02}, "2.0% of tokens get no loss"),
    ],
)
def test_each_trouble_is_named_with_its_amount(kind: str, changes: dict[str, float], words: str) -> None:
    found = health_words(rl_metrics(1, **changes))
    assert list(found) == [kind]
    assert words in found[kind]


@pytest.mark.parametrize(
    "changes",
    [
        {"mismatch__logprob_diff": 0.05},
        {"mismatch__logprob_diff": 0.3, "mismatch__fresh": 0.05, "staleness__mean": 1.0},
        {"policy__clip_fraction_low": 0.15, "policy__clip_fraction_high": 0.15},
        {"policy__kl_old": 0.1},
        {"response__share_length": 0.3},
        {"response__share_error": 0.05},
        {"tools__unparsed": 0.05},
        {"correction__rejected": 0.3},
        {"rollout__unknown_support": 0.01},
        {"groups__zero_variance": 0.97},
    ],
)
def test_a_number_at_its_limit_is_not_yet_off(changes: dict[str, float]) -> None:
    assert health_words(rl_metrics(1, **changes)) == {}


def test_equal_rewards_are_named_only_if_no_advantage_is_left() -> None:
    line = rl_metrics(1, groups__zero_variance=1.0, advantage__max=1e-11, advantage__min=-1e-11)
    assert list(health_words(line)) == ["equal_rewards"]
    assert health_words(rl_metrics(1, groups__zero_variance=1.0, advantage__max=0.7)) == {}


def test_a_mismatch_is_held_against_earlier_steps_whose_tokens_were_as_old() -> None:
    watch = HealthWatch({})

    def words_of(age: float, difference: float, **more: float) -> dict[str, str]:
        return watch.judge(1, rl_metrics(1, staleness__mean=age, mismatch__logprob_diff=difference, **more))

    # It grows with the age, from rounding in bf16 on.
    assert not any(words_of(0.0, 0.0005) for _ in range(6))
    assert not any(words_of(age / 10, 0.0005 + age / 400, mismatch__fresh=1e-6) for age in range(21))
    assert words_of(1.0, 0.12) == {}
    assert list(words_of(1.0, 0.7)) == ["mismatch_jump"]
    jump = words_of(1.9, 0.95)["mismatch_jump"]
    assert "1.9 updates old on average differ by 0.950 nats on average, after 0.0" in jump
    assert "grad_norm" in jump
    assert "tokens of the current weights differ by 0.020" in words_of(1.0, 0.1, mismatch__fresh=0.02)["mismatch_jump"]
    assert words_of(1.0, 0.1, mismatch__fresh=0.009) == {}


def test_a_run_that_corrects_the_mismatch_already_is_not_told_to() -> None:
    assert "source.correction" in health_words(rl_metrics(1, mismatch__logprob_diff=0.2))["mismatch"]
    corrected = health_words(rl_metrics(1, mismatch__logprob_diff=0.2, correction__factor=0.9))["mismatch"]
    assert "source.correction" not in corrected
