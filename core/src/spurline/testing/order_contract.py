"""Check that static orders cover the mixture and are pure, and that adaptive orders keep their state."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spurline.protocols.order import AdaptiveOrder, Order, OrderConfig, SampleFacts, ScoredDraw
from spurline.run.checkpoints.state_files import read_state, write_state

Mixture = tuple[Sequence[int], Sequence[float], int]

MIXTURES: Sequence[Mixture] = (
    ([13], [1.0], 4),
    ([1], [1.0], 4),
    ([6, 4], [0.5, 1.5], 3),
    ([30, 7, 5], [1.0, 2.0, 0.4], 8),
    ([64], [1.0], 64),
)
"""Sizes and weights of datasets, and samples per step."""

_STEPS = 12


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


class OrderContract:
    """A suite of tests for orders. Write a subclass with `config` and `make_order(samples, seed)`.

    Some tests are only for orders whose `config.adaptive` is true, and some only for other orders.
    """

    config: OrderConfig

    def make_order(self, samples: SampleFacts, seed: int) -> Order:
        """Return your order, made with `self.config`."""
        raise NotImplementedError("subclass OrderContract with config and make_order(self, samples, seed)")

    def row(self, number: int) -> Mapping[str, Any]:
        """Return the row of a sample. Override this if your order reads other columns."""
        return {"difficulty": 7 * number % 5}

    def scored(self, position: int, sample: int, random: np.random.Generator) -> ScoredDraw:
        """Return the result of a draw: three attempts, each with a reward of 0 or 1 under the name `reward`."""
        rewards = tuple(random.integers(0, 2, 3).astype(float).tolist())
        return ScoredDraw(position, sample, rewards, {"reward": rewards})

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
        for step in range(_STEPS):
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

    def test_an_order_observes_if_and_only_if_its_config_says_so(self) -> None:
        order = self.make_order(self.samples(MIXTURES[0]), 1)
        assert isinstance(order, AdaptiveOrder) == self.config.adaptive

    def test_the_order_neither_uses_nor_moves_global_random_state(self) -> None:
        samples, found = self.samples(MIXTURES[3]), list[NDArray[np.int64]]()
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)
            before = random.getstate(), str(np.random.get_state())
            found.append(self.make_order(samples, 1).positions(0, 100).copy())
            assert (random.getstate(), str(np.random.get_state())) == before, "global random state was moved"
        assert np.array_equal(found[0], found[1]), "the order depends on global random state"

    @pytest.mark.parametrize("mixture", MIXTURES, ids=str)
    def test_each_epoch_of_a_static_order_covers_the_weighted_mixture(self, mixture: Mixture) -> None:
        if self.config.adaptive:
            return
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
    def test_a_static_order_is_pure(self, mixture: Mixture) -> None:
        if self.config.adaptive:
            return
        samples = self.samples(mixture)
        order, again = self.make_order(samples, 1), self.make_order(samples, 1)
        expected = [self.step(order, samples, step).tolist() for step in range(40)]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda step: self.step(again, samples, step).tolist(), reversed(range(40))))
        assert found[::-1] == expected

    @pytest.mark.parametrize("mixture", MIXTURES, ids=str)
    def test_what_an_adaptive_order_gave_once_stays_whatever_it_observes(self, mixture: Mixture) -> None:
        if not self.config.adaptive:
            return
        samples = self.samples(mixture)
        order, given = self.make_order(samples, 1), list[int]()
        chance = np.random.default_rng(0)
        for step in range(_STEPS):
            given += self.step(order, samples, step).tolist()
            self.observe(order, samples, step, chance)
            assert order.positions(0, len(given)).tolist() == given

    @pytest.mark.parametrize("killed_after", [0, 3, _STEPS - 1])
    @pytest.mark.parametrize("mixture", MIXTURES, ids=str)
    def test_an_adaptive_order_goes_on_after_a_resume_as_if_it_had_not_ended(
        self, mixture: Mixture, killed_after: int
    ) -> None:
        if not self.config.adaptive:
            return
        samples = self.samples(mixture)
        expected, found = list[list[int]](), list[list[int]]()
        for result, kills in ((expected, False), (found, True)):
            order, chance = self.make_order(samples, 1), np.random.default_rng(0)
            for step in range(_STEPS):
                # Prompts of the next step are read before this step's rewards are observed.
                self.step(order, samples, step + 1)
                self.observe(order, samples, step, chance)
                result.append(self.step(order, samples, step).tolist())
                if kills and step == killed_after:
                    order = self.restored(order, samples)
        assert found == expected

    def test_what_an_adaptive_order_observes_changes_what_comes(self) -> None:
        if not self.config.adaptive:
            return
        samples, found = self.samples(MIXTURES[3]), list[list[int]]()
        for seed in (0, 1):
            order, chance = self.make_order(samples, 1), np.random.default_rng(seed)
            for step in range(_STEPS):
                self.observe(order, samples, step, chance)
            found.append(order.positions(0, _STEPS * samples.per_step).tolist())
        assert found[0] != found[1]

    def step(self, order: Order, samples: SampleFacts, step: int) -> NDArray[np.int64]:
        """Return the samples of a step, counted from 0."""
        return order.positions(step * samples.per_step, (step + 1) * samples.per_step)

    def observe(self, order: Order, samples: SampleFacts, step: int, chance: np.random.Generator) -> None:
        """Let the order observe random rewards for the prompts of a step."""
        assert isinstance(order, AdaptiveOrder)
        first, drawn = step * samples.per_step, self.step(order, samples, step).tolist()
        order.observe(step + 1, [self.scored(first + place, sample, chance) for place, sample in enumerate(drawn)])

    def restored(self, order: Order, samples: SampleFacts) -> Order:
        """Return a new order with the state of this one, restored from files."""
        fresh = self.make_order(samples, 1)
        assert isinstance(order, AdaptiveOrder)
        assert isinstance(fresh, AdaptiveOrder)
        with tempfile.TemporaryDirectory() as folder:
            write_state(Path(folder) / "order", order.state_dict())
            fresh.load_state_dict(read_state(Path(folder) / "order"))
        return fresh
