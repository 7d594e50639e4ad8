"""Orders made of epochs: pure functions of the config, the samples and the seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spurline.data.configs import (
    CurriculumOrderConfig,
    LengthGroupedOrderConfig,
    SequentialOrderConfig,
    UniformOrderConfig,
)
from spurline.data.orders.epochs import CurriculumOrder, LengthGroupedOrder, SequentialOrder, UniformOrder, permutation
from spurline.errors import ConfigError
from spurline.protocols.order import SampleFacts

sizes_strategy = st.lists(st.integers(1, 30), min_size=1, max_size=3)

LEVELS = 7


class Levels:
    """What the rows behind samples say: a number under one name. See `SampleColumns`."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = np.array(numbers, np.float64)

    def values(self, name: str) -> Sequence[Any]:
        return self.numbers(name).tolist()

    def numbers(self, name: str) -> NDArray[np.float64]:
        assert name == "meta.level"
        return self._numbers

    def location(self, sample: int) -> str:
        return f"rows.jsonl:{sample + 1}"


def facts(
    sizes: Sequence[int], weights: Sequence[float] | None = None, per_step: int = 4, lengths: Any = None
) -> SampleFacts:
    """Samples with a column `meta.level`; their lengths are random unless given."""
    columns = Levels([5 * row % LEVELS for size in sizes for row in range(size)])
    known = np.random.default_rng(0).integers(1, 500, sum(sizes)) if lengths is None else np.array(lengths)
    return SampleFacts(tuple(sizes), tuple(weights or [1.0] * len(sizes)), per_step, columns, lambda: known)


def level(sample: int, sizes: Sequence[int]) -> int:
    starts = np.cumsum([0, *sizes])
    return 5 * (sample - int(starts[np.searchsorted(starts, sample, side="right") - 1])) % LEVELS


def uniform(samples: SampleFacts, seed: int = 0) -> UniformOrder:
    return UniformOrder(UniformOrderConfig(), samples=samples, seed=seed)


def curriculum(samples: SampleFacts, seed: int = 0, **settings: Any) -> CurriculumOrder:
    return CurriculumOrder(CurriculumOrderConfig(column="meta.level", **settings), samples=samples, seed=seed)


def length_grouped(samples: SampleFacts, seed: int = 0, **settings: Any) -> LengthGroupedOrder:
    return LengthGroupedOrder(LengthGroupedOrderConfig(**settings), samples=samples, seed=seed)


def epoch(order: Any, samples: SampleFacts, number: int = 0) -> NDArray[np.int64]:
    size = samples.samples_per_epoch
    return order.positions(number * size, (number + 1) * size)


@given(count=st.integers(0, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_permutation_is_a_permutation_and_repeats_itself(count: int, seed: int, epoch: int) -> None:
    first = permutation(count, seed, epoch)
    assert sorted(first.tolist()) == list(range(count))
    assert np.array_equal(first, permutation(count, seed, epoch))


def test_permutation_is_pinned_forever() -> None:
    # A change here silently reorders every run that is resumed after an upgrade.
    assert permutation(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(8, seed=1, epoch=2).tolist() == [7, 5, 4, 0, 3, 6, 1, 2]


def test_the_orders_are_pinned_forever() -> None:
    # The uniform order is what Spurline had before there was a choice.
    samples = facts([6, 4], [0.5, 1.5], per_step=3)
    assert uniform(samples, 3).positions(0, 18).tolist() == UNIFORM
    assert SequentialOrder(SequentialOrderConfig(), samples=samples, seed=3).positions(0, 18).tolist() == SEQUENTIAL
    assert curriculum(samples, 3).positions(0, 18).tolist() == CURRICULUM
    assert curriculum(samples, 3, stages=2).positions(0, 18).tolist() == STAGES
    assert length_grouped(samples, 3, pool_batches=2).positions(0, 18).tolist() == LENGTH_GROUPED


UNIFORM = [6, 5, 9, 9, 4, 8, 7, 8, 3, 7, 2, 0, 9, 6, 1, 6, 8, 7]
SEQUENTIAL = [0, 1, 2, 6, 7, 8, 9, 6, 7, 3, 4, 5, 8, 9, 6, 7, 8, 9]
CURRICULUM = [6, 9, 9, 3, 8, 8, 5, 7, 4, 0, 6, 6, 9, 2, 8, 7, 1, 7]
STAGES = [6, 9, 3, 8, 9, 8, 5, 4, 7, 9, 6, 0, 2, 6, 7, 1, 8, 7]
LENGTH_GROUPED = [5, 6, 8, 4, 9, 9, 7, 8, 3, 7, 6, 2, 7, 6, 8, 1, 9, 0]


@given(sizes=sizes_strategy, seed=st.integers(0, 99), number=st.integers(0, 3))
def test_a_curriculum_rises_in_each_epoch_and_shuffles_what_is_as_hard(
    sizes: list[int], seed: int, number: int
) -> None:
    samples = facts(sizes)
    rising = [level(int(sample), sizes) for sample in epoch(curriculum(samples, seed), samples, number)]
    assert rising == sorted(rising)
    falling = curriculum(samples, seed, direction="descending")
    levels = [level(int(sample), sizes) for sample in epoch(falling, samples, number)]
    assert levels == sorted(levels, reverse=True)


def test_stages_rise_and_are_shuffled_within() -> None:
    samples = facts([70])
    levels = [level(int(sample), [70]) for sample in epoch(curriculum(samples, stages=2), samples)]
    easy, hard = levels[:35], levels[35:]
    assert max(easy) <= min(hard)
    assert easy != sorted(easy)
    assert hard != sorted(hard)


def test_samples_of_similar_length_share_a_batch_and_batches_are_shuffled() -> None:
    lengths = np.random.default_rng(1).permutation(1000)
    samples = facts([1000], per_step=8, lengths=lengths)
    order = length_grouped(samples, pool_batches=1000)
    for step in range(1, 250):
        batch = lengths[order.positions(8 * step - 8, 8 * step)]
        where_epochs_meet = 8 * step - 8 < 1000 * (8 * step // 1000) < 8 * step
        assert where_epochs_meet or np.ptp(batch) == 7, step
    means = lengths[epoch(order, samples)].reshape(-1, 8).mean(axis=1)
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


def test_batches_are_grouped_by_length_also_after_an_epoch_that_ends_within_one() -> None:
    samples = facts([1003], per_step=8, lengths=np.arange(1003))
    order = length_grouped(samples, pool_batches=1000)
    spreads = [np.ptp(order.positions(8 * step, 8 * step + 8)) for step in range(500)]
    # 1003 = 125 * 8 + 3: each epoch leaves a few random samples over, which belong to the batches at its ends.
    assert sum(spread > 20 for spread in spreads) <= 4
    assert np.median(spreads) == 7


def test_lengths_that_nobody_knows_are_refused() -> None:
    samples = SampleFacts((3,), (1.0,), 1, facts([3]).columns)
    with pytest.raises(ConfigError, match=r"data\.order needs the length of each sample"):
        length_grouped(samples)


def test_a_sample_without_a_number_comes_last() -> None:
    samples = SampleFacts((3,), (1.0,), 1, Levels([2, float("nan"), 1]))
    for direction, expected in (("ascending", [2, 0, 1]), ("descending", [0, 2, 1])):
        assert curriculum(samples, direction=direction).positions(0, 3).tolist() == expected
