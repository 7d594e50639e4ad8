"""Order `reward_adaptive`: what is sometimes solved comes more often, and what was drawn stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spurline.protocols.order import SampleFacts
from spurline_rl.protocols.adaptive_order import ScoredDraw
from spurline_rl.reward_adaptive import RewardAdaptiveOrder
from spurline_rl.training_configs import RewardAdaptiveOrderConfig
from spurline_text.sources.sft import ColumnsOfRows


def order_of(
    sizes: Sequence[int], weights: Sequence[float] | None = None, per_step: int = 8, seed: int = 0, **settings: Any
) -> RewardAdaptiveOrder:
    facts = SampleFacts(tuple(sizes), tuple(weights or [1.0] * len(sizes)), per_step, ColumnsOfRows([], []))
    return RewardAdaptiveOrder(RewardAdaptiveOrderConfig(**settings), samples=facts, seed=seed)


def draw_and_observe(order: RewardAdaptiveOrder, success: Sequence[float], steps: int, size: int = 8) -> np.ndarray:
    """How often each prompt was drawn; each has the same mean reward all the time."""
    counts = np.zeros(len(success), np.int64)
    for step in range(steps):
        drawn = order.positions(step * size, (step + 1) * size)
        counts += np.bincount(drawn, minlength=len(success))
        order.observe(
            step + 1, [ScoredDraw(step * size + place, int(s), (success[s],), {}) for place, s in enumerate(drawn)]
        )
    return counts


def test_prompts_that_are_sometimes_solved_come_more_often() -> None:
    success = [0.0, 0.5, 1.0, 0.9] * 16
    counts = draw_and_observe(order_of([64]), success, 200).reshape(-1, 4).sum(axis=0)
    never, half, always, mostly = counts.tolist()
    # Weights 0.1, 1, 0.1 and 0.1 + 0.9 * 4 * 0.9 * 0.1 = 0.424; drawing without replacement evens them a little.
    assert 5 < half / never < 10
    assert 5 < half / always < 10
    assert 1.8 < half / mostly < 3


def test_every_prompt_is_tried_before_those_that_teach_nothing_come_again() -> None:
    counts = draw_and_observe(order_of([64], floor=1e-9), [0.0] * 64, 8)
    assert counts.tolist() == [1] * 64


def test_rewards_on_another_scale_are_told_by_failed_and_solved() -> None:
    success = [-1.0, 0.5, 2.0, 5.0] * 16
    counts = draw_and_observe(order_of([64], failed=-1.0, solved=2.0), success, 200).reshape(-1, 4).sum(axis=0)
    assert counts[1] > 4 * max(counts[0], counts[2], counts[3])


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3), seed=st.integers(0, 99), step=st.integers(0, 5))
def test_no_step_takes_a_prompt_twice(sizes: list[int], seed: int, step: int) -> None:
    order = order_of(sizes, seed=seed, per_step=min(6, sum(sizes)))
    size = min(6, sum(sizes))
    assert len(set(order.positions(step * size, (step + 1) * size).tolist())) == size


def test_what_is_drawn_is_pinned_forever() -> None:
    order = order_of([20])
    order.observe(1, [ScoredDraw(0, sample, (0.0,), {}) for sample in range(10)])
    assert order.positions(0, 16).tolist() == DRAWN


DRAWN = [13, 11, 16, 18, 17, 14, 10, 4, 19, 4, 12, 7, 15, 9, 5, 0]


def test_a_prompt_without_an_outcome_does_not_come_again_as_if_it_were_new() -> None:
    order = order_of([64], floor=0.05)
    counts = np.zeros(64, np.int64)
    for step in range(100):
        drawn = order.positions(8 * step, 8 * step + 8)
        counts += np.bincount(drawn, minlength=64)
        # The first half cannot be used, so nobody hears of them.
        order.observe(step + 1, [ScoredDraw(8 * step, int(s), (0.0, 1.0), {}) for s in drawn if s >= 32])
    assert counts[:32].sum() < counts[32:].sum() / 5
