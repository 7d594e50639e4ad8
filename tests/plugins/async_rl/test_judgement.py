"""The verdicts on engines, from simulated logprobs: rounding, updates of the weights, and engines that lag behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline_async_rl.proof.judgement import Judge, Verdict

TOKENS = 32


def verdicts(
    has: Callable[[int], int],
    *,
    rounding: float,
    step: float,
    momentum: float = 0.5,
    spread: float = 0.0,
    count: int = 60,
    seed: int = 0,
) -> list[Verdict]:
    """Judge `count` publishes to an engine that has the weights of version `has(version)`.

    An update moves each logprob by about `step`. Half of the engine's rounding is the same at each publish. The trainer
    rounds too. `spread` is the standard deviation of the logarithm of each token's share of rounding and updates.
    """
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, spread, TOKENS))
    bias = rng.normal(0, rounding, TOKENS) / np.sqrt(2)
    update, trainer = rng.normal(0, step, TOKENS), [rng.normal(-2, 1, TOKENS)]
    for _ in range(count):
        update = momentum * update + np.sqrt(1 - momentum**2) * rng.normal(0, step, TOKENS)
        trainer.append(trainer[-1] + scale * update)
    judge = Judge()
    found: list[Verdict] = []
    for version in range(count):
        engine = trainer[max(0, has(version))] + scale * (bias + rng.normal(0, rounding, TOKENS) / np.sqrt(2))
        scored = trainer[version] + scale * rng.normal(0, rounding / 2, TOKENS)
        found.append(judge.judge(version, range(TOKENS), engine.astype(np.float32), scored.astype(np.float32)))
    return found


def first_fault(found: list[Verdict]) -> int | None:
    return next((version for version, verdict in enumerate(found) if verdict.fault), None)


@settings(max_examples=60)
@given(
    rounding=st.sampled_from([1e-7, 1e-6, 1e-4, 1e-2]),
    step=st.sampled_from([0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1]),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    spread=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_an_honest_engine_is_always_believed(rounding: float, step: float, momentum: float, spread: float, seed: int):
    found = verdicts(lambda version: version, rounding=rounding, step=step, momentum=momentum, spread=spread, seed=seed)
    assert [verdict.fault for verdict in found if verdict.fault] == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rounding", "step"), [(1e-6, 1e-4), (1e-6, 1e-2), (1e-6, 0.3), (1e-2, 0.2)])
@pytest.mark.parametrize(
    ("has", "version"),
    [(lambda version: min(version, 20), 21), (lambda version: version - (version >= 20), 20), (lambda version: 0, 1)],
    ids=["frozen", "a version late", "never updated"],
)
def test_an_engine_with_older_weights_is_found_out_at_once(
    has: Callable[[int], int], version: int, rounding: float, step: float, seed: int
):
    assert first_fault(verdicts(has, rounding=rounding, step=step, seed=seed)) == version


@pytest.mark.parametrize("seed", range(5))
def test_updates_that_are_smaller_than_the_rounding_are_told_apart_after_some_publishes(seed: int):
    found = verdicts(lambda version: min(version, 20), rounding=1e-2, step=1.5e-2, seed=seed)
    version = first_fault(found)
    assert version is not None
    assert 20 < version < 60


def test_the_delivered_share_is_1_for_an_engine_with_the_weights_and_0_for_one_with_those_before():
    honest = verdicts(lambda version: version, rounding=1e-6, step=1e-2)
    assert honest[0].delivered is None
    assert [round(verdict.delivered or 0, 2) for verdict in honest[1:]] == [1.0] * 59
    late = verdicts(lambda version: version - (version == 5), rounding=1e-6, step=1e-2, count=6)
    assert late[5].delivered == pytest.approx(0, abs=1e-2)
    assert "times as far" in late[5].fault or "nats" in late[5].fault


def one(judge: Judge, version: int, tokens: list[int], given: list[float], scored: list[float]) -> Verdict:
    return judge.judge(version, tokens, np.array(given, np.float32), np.array(scored, np.float32))


@pytest.mark.parametrize(("difference", "bar"), [(0.0, 1e-3), (2e-3, 0.05), (0.06, 0.18), (0.4, 0.5)])
def test_the_difference_that_is_measured_first_sets_the_limit(difference: float, bar: float):
    judge, tokens = Judge(), [7] * TOKENS
    verdict = one(judge, 0, tokens, [-1.0] * TOKENS, [-1.0 - difference] * TOKENS)
    assert verdict == Verdict(pytest.approx(difference, rel=1e-3), is_far=difference > 0.05)
    assert judge.bar == pytest.approx(bar, rel=1e-3)
    assert one(judge, 0, tokens, [-1.0] * TOKENS, [-1.01 - bar] * TOKENS).fault


def test_equal_logprobs_in_bf16_do_not_mean_fp32():
    judge = Judge(in_fp32=False)
    one(judge, 0, [7] * TOKENS, [-1.0] * TOKENS, [-1.0] * TOKENS)
    assert judge.bar == 0.05


def test_likely_tokens_and_few_tokens_measure_nothing():
    judge = Judge()
    one(judge, 0, [7] * TOKENS, [-1e-5] * TOKENS, [-1e-5] * TOKENS)
    one(judge, 0, [7, 8], [-1.0, -1.0], [-1.0, -1.0])
    assert judge.bar == 0.5


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_logprobs_that_are_not_finite_are_a_fault(broken: float):
    assert one(Judge(), 0, [7, 8], [-1.0, broken], [-1.0, -1.0]).fault


def test_only_tokens_with_the_same_tokens_before_them_show_how_the_weights_moved():
    judge = Judge()
    one(judge, 0, [1, 2, 3], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0])
    # The second token differs, so only the first one was scored with both weights.
    moved = one(judge, 1, [1, 5, 3], [-1.1, -3.0, -3.0], [-1.1, -3.0, -3.0])
    assert moved.delivered == pytest.approx(1)
    assert one(judge, 1, [1, 2, 3], [-1.0, -1.0, -1.0], [-1.1, -1.1, -1.1]).fault
    assert one(judge, 2, [9], [-1.0], [-1.0]).delivered is None
