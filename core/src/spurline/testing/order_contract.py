"""Check that orders cover the mixture and are pure."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spurline.protocols.order import Order, SampleFacts

Mixture = tuple[Sequence[int], Sequence[float], int]

MIXTURES: Sequence[Mixture] = (
    ([13], [1.0], 4),
    ([1], [1.0], 4),
    ([6, 4], [0.5, 1.5], 3),
    ([30, 7, 5], [1.0, 2.0, 0.4], 8),
    ([64], [1.0], 64),
)
"""Sizes and weights of datasets, and samples per step."""

STEPS = 12


class _Columns:
    """`SampleColumns` of rows in memory."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    def values(self, name: str) -> Sequence[Any]:
        return [functools.reduce(lambda value, key: value[key], name.split("."), row) for row in self.rows]

    def numbers(self, name: str) -> NDArray[np.float64]:
        return np.array(self.values(name), np.float64)

    def location(self, sample: int) -> str:
        return f"row {sample}"


class PositionsContract:
    """Tests of any order, also of one that learns during the run. Write a subclass with `make_order(samples, seed)`."""

    def make_order(self, samples: SampleFacts, seed: int) -> Order:
        """Return your order."""
        raise NotImplementedError(f"subclass {type(self).__name__} with make_order(self, samples, seed)")

    def row(self, number: int) -> Mapping[str, Any]:
        """Return the row of a sample. Override this if your order reads other columns."""
        return {"difficulty": 7 * number % 5}

    def samples(self, mixture: Mixture) -> SampleFacts:
        """Return the facts about the samples that your order gets. Lengths are random."""
        sizes, weights, per_step = mixture
        columns = _Columns([self.row(number) for size in sizes for number in range(size)])
        lengths = np.random.default_rng(0).integers(1, 500, sum(sizes)).astype(np.int64)
        return SampleFacts(tuple(sizes), tuple(weights), per_step, columns, lambda: lengths)

    @pytest.mark.parametrize("mixture", MIXTURES, ids=str)
    def test_positions_are_samples_that_exist(self, mixture: Mixture) -> None:
        samples = self.samples(mixture)
        order = self.make_order(samples, 1)
        for step in range(STEPS):
            found = self.step(order, samples, step)
            assert (found.dtype, found.shape) == (np.int64, (samples.per_step,))
            assert ((found >= 0) & (found < sum(samples.sizes))).all(), found
        assert order.positions(5, 5).shape == (0,)

    @pytest.mark.parametrize("mixture", MIXTURES, ids=str)
    def test_any_slice_of_the_order_is_the_same_however_it_is_asked_for(self, mixture: Mixture) -> None:
        samples = self.samples(mixture)
        order = self.make_order(samples, 1)
        stop = 3 * samples.samples_per_epoch
        whole = order.positions(0, stop).copy()
        for width in (1, 2, 7, samples.samples_per_epoch):
            for start in reversed(range(0, stop - width, width)):
                assert np.array_equal(order.positions(start, start + width), whole[start : start + width])

    def test_the_order_neither_uses_nor_moves_global_random_state(self) -> None:
        samples, found = self.samples(MIXTURES[3]), list[NDArray[np.int64]]()
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)
            before = random.getstate(), str(np.random.get_state())
            found.append(self.make_order(samples, 1).positions(0, 100).copy())
            assert (random.getstate(), str(np.random.get_state())) == before, "global random state was moved"
        assert np.array_equal(found[0], found[1]), "the order depends on global random state"

    def step(self, order: Order, samples: SampleFacts, step: int) -> NDArray[np.int64]:
        """Return the samples of a step, counted from 0."""
        return order.positions(step * samples.per_step, (step + 1) * samples.per_step)


class OrderContract(PositionsContract):
    """A suite of tests for orders. Write a subclass with `make_order(samples, seed)`."""

    @pytest.mark.parametrize("mixture", MIXTURES, ids=str)
    def test_each_epoch_covers_the_weighted_mixture(self, mixture: Mixture) -> None:
        samples = self.samples(mixture)
        order, size = self.make_order(samples, 1), samples.samples_per_epoch
        starts = np.cumsum([0, *samples.sizes])
        counts = np.zeros(sum(samples.sizes), np.int64)
        for epoch in range(5):
            counts += np.bincount(order.positions(epoch * size, (epoch + 1) * size), minlength=len(counts))
            for dataset, share in enumerate(samples.shares):
                own = counts[starts[dataset] : starts[dataset + 1]]
                assert (own.sum(), np.ptp(own) <= 1) == ((epoch + 1) * share, True), (dataset, epoch, own)

    @pytest.mark.parametrize("mixture", MIXTURES, ids=str)
    def test_the_order_is_pure(self, mixture: Mixture) -> None:
        samples = self.samples(mixture)
        order, again = self.make_order(samples, 1), self.make_order(samples, 1)
        expected = [self.step(order, samples, step).tolist() for step in range(40)]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda step: self.step(again, samples, step).tolist(), reversed(range(40))))
        assert found[::-1] == expected
