"""Check that an order that learns from rewards never changes samples that it has given, and resumes exactly."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from spurline.protocols.order import SampleFacts
from spurline.run.checkpoints.state_files import read_state, write_state
from spurline.testing.order_contract import MIXTURES, STEPS, Mixture, PositionsContract
from spurline_rl.protocols.adaptive_order import AdaptiveOrder, ScoredDraw


class AdaptiveOrderContract(PositionsContract):
    """A test suite for orders that learn from rewards: define `make_order(samples, seed)` in a subclass."""

    def make_order(self, samples: SampleFacts, seed: int) -> AdaptiveOrder:
        raise NotImplementedError("subclass AdaptiveOrderContract with make_order(self, samples, seed)")

    def scored(self, position: int, sample: int, random: np.random.Generator) -> ScoredDraw:
        """Return the result of a draw: three attempts, each with a reward of 0 or 1 under the name `reward`."""
        rewards = tuple(random.integers(0, 2, 3).astype(float).tolist())
        return ScoredDraw(position, sample, rewards, {"reward": rewards})

    @pytest.mark.parametrize("mixture", MIXTURES, ids=str)
    def test_what_the_order_gave_once_stays_whatever_it_observes(self, mixture: Mixture) -> None:
        samples = self.samples(mixture)
        order, given = self.make_order(samples, 1), list[int]()
        chance = np.random.default_rng(0)
        for step in range(STEPS):
            given += self.step(order, samples, step).tolist()
            self.observe(order, samples, step, chance)
            assert order.positions(0, len(given)).tolist() == given

    @pytest.mark.parametrize("killed_after", [0, 3, STEPS - 1])
    @pytest.mark.parametrize("mixture", MIXTURES, ids=str)
    def test_the_order_goes_on_after_a_resume_as_if_it_had_not_ended(self, mixture: Mixture, killed_after: int) -> None:
        samples = self.samples(mixture)
        expected, found = list[list[int]](), list[list[int]]()
        for result, kills in ((expected, False), (found, True)):
            order, chance = self.make_order(samples, 1), np.random.default_rng(0)
            for step in range(STEPS):
                # Prompts of the next step are read before this step's rewards are observed.
                self.step(order, samples, step + 1)
                self.observe(order, samples, step, chance)
                result.append(self.step(order, samples, step).tolist())
                if kills and step == killed_after:
                    order = self.restored(order, samples)
        assert found == expected

    def test_what_the_order_observes_changes_what_comes(self) -> None:
        samples, found = self.samples(MIXTURES[3]), list[list[int]]()
        for seed in (0, 1):
            order, chance = self.make_order(samples, 1), np.random.default_rng(seed)
            for step in range(STEPS):
                self.observe(order, samples, step, chance)
            found.append(order.positions(0, STEPS * samples.per_step).tolist())
        assert found[0] != found[1]

    def observe(self, order: AdaptiveOrder, samples: SampleFacts, step: int, chance: np.random.Generator) -> None:
        """Let the order observe random rewards for the prompts of a step."""
        first, drawn = step * samples.per_step, self.step(order, samples, step).tolist()
        order.observe(step + 1, [self.scored(first + place, sample, chance) for place, sample in enumerate(drawn)])

    def restored(self, order: AdaptiveOrder, samples: SampleFacts) -> AdaptiveOrder:
        """Return a new order with the state of this one, restored from files."""
        fresh = self.make_order(samples, 1)
        with tempfile.TemporaryDirectory() as folder:
            write_state(Path(folder) / "order", order.state_dict())
            fresh.load_state_dict(read_state(Path(folder) / "order"))
        return fresh
