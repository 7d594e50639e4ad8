"""Core's orders keep the contract, and the contract fails for orders that break it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from spurline.data.orders.configs import (
    CurriculumOrderConfig,
    LengthGroupedOrderConfig,
    SequentialOrderConfig,
    UniformOrderConfig,
)
from spurline.data.orders.epochs import CurriculumOrder, Indices, LengthGroupedOrder, SequentialOrder, UniformOrder
from spurline.protocols.order import Order, OrderConfig, SampleFacts, ScoredDraw
from spurline.testing import OrderContract
from spurline.testing.order_contract import MIXTURES
from spurline_rl.reward_adaptive import RewardAdaptiveOrder
from spurline_rl.training_configs import RewardAdaptiveOrderConfig


class TestUniform(OrderContract):
    config = UniformOrderConfig()

    def make_order(self, samples: SampleFacts, seed: int) -> UniformOrder:
        return UniformOrder(self.config, samples=samples, seed=seed)


class TestSequential(OrderContract):
    config = SequentialOrderConfig()

    def make_order(self, samples: SampleFacts, seed: int) -> SequentialOrder:
        return SequentialOrder(self.config, samples=samples, seed=seed)


class TestLengthGrouped(OrderContract):
    config = LengthGroupedOrderConfig(pool_batches=2)

    def make_order(self, samples: SampleFacts, seed: int) -> LengthGroupedOrder:
        return LengthGroupedOrder(self.config, samples=samples, seed=seed)


class TestCurriculum(OrderContract):
    config = CurriculumOrderConfig(column="difficulty")

    def make_order(self, samples: SampleFacts, seed: int) -> CurriculumOrder:
        return CurriculumOrder(self.config, samples=samples, seed=seed)


class TestCurriculumInStages(TestCurriculum):
    config = CurriculumOrderConfig(column="meta.difficulty", direction="descending", stages=3)

    def row(self, number: int) -> Mapping[str, Any]:
        return {"meta": super().row(number)}


class TestRewardAdaptive(OrderContract):
    config = RewardAdaptiveOrderConfig()

    def make_order(self, samples: SampleFacts, seed: int) -> RewardAdaptiveOrder:
        return RewardAdaptiveOrder(self.config, samples=samples, seed=seed)


class TestRewardAdaptiveByName(TestRewardAdaptive):
    config = RewardAdaptiveOrderConfig(reward="reward", floor=0.5)


class _DropsTheLast(UniformOrder):
    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        arranged = super().arrange(mixture, epoch).copy()
        arranged[-1] = arranged[0]
        return arranged


class _SameStartEachEpoch(SequentialOrder):
    def positions(self, start: int, stop: int) -> Indices:
        return np.arange(start, stop) % self.samples.samples_per_epoch % sum(self.samples.sizes)


class _GlobalRandomness(UniformOrder):
    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        return np.random.permutation(mixture)


class _DependsOnWhatWasAskedBefore(UniformOrder):
    asked = 0

    def positions(self, start: int, stop: int) -> Indices:
        self.asked += 1
        return super().positions(start + self.asked, stop + self.asked)


class _SaysItAdapts(UniformOrder):
    def observe(self, step: int, draws: Sequence[ScoredDraw]) -> None: ...
    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


class _WrongType(UniformOrder):
    def positions(self, start: int, stop: int) -> Indices:
        return super().positions(start, stop).astype(np.int32)  # type: ignore[return-value]


class _DrawsAgainAfterObserving(RewardAdaptiveOrder):
    def observe(self, step: int, draws: Sequence[ScoredDraw]) -> None:
        super().observe(step, draws)
        self._blocks = []


class _ForgetsWhatItDrew(RewardAdaptiveOrder):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._blocks = []


class _ForgetsWhatItObserved(RewardAdaptiveOrder):
    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "success": np.full(len(self._success), np.nan)}


class _LearnsNothing(RewardAdaptiveOrder):
    def observe(self, step: int, draws: Sequence[ScoredDraw]) -> None: ...


def contract_of(order: type[Any], config: OrderConfig) -> OrderContract:
    class Suite(OrderContract):
        def make_order(self, samples: SampleFacts, seed: int) -> Order:
            return order(self.config, samples=samples, seed=seed)

    suite = Suite()
    suite.config = config
    return suite


class _CallsItselfAdaptive(UniformOrderConfig):
    adaptive: ClassVar[bool] = True


ANY_SLICE = "any_slice_of_the_order_is_the_same_however_it_is_asked_for"
COVERS = "each_epoch_of_a_static_order_covers_the_weighted_mixture"
SAYS_SO = "an_order_observes_if_and_only_if_its_config_says_so"
STAYS = "what_an_adaptive_order_gave_once_stays_whatever_it_observes"
GOES_ON = "an_adaptive_order_goes_on_after_a_resume_as_if_it_had_not_ended"
UNIFORM, ADAPTIVE = UniformOrderConfig(), RewardAdaptiveOrderConfig()


@pytest.mark.parametrize(
    ("order", "config", "test", "arguments"),
    [
        (_DropsTheLast, UNIFORM, COVERS, [MIXTURES[0]]),
        (_SameStartEachEpoch, UNIFORM, COVERS, [MIXTURES[2]]),
        (_GlobalRandomness, UNIFORM, "the_order_neither_uses_nor_moves_global_random_state", []),
        (_GlobalRandomness, UNIFORM, "a_static_order_is_pure", [MIXTURES[0]]),
        (_DependsOnWhatWasAskedBefore, UNIFORM, ANY_SLICE, [MIXTURES[0]]),
        (_SaysItAdapts, UNIFORM, SAYS_SO, []),
        (UniformOrder, _CallsItselfAdaptive(), SAYS_SO, []),
        (_WrongType, UNIFORM, "positions_are_samples_that_exist", [MIXTURES[0]]),
        (_DrawsAgainAfterObserving, ADAPTIVE, STAYS, [MIXTURES[3]]),
        (_ForgetsWhatItDrew, ADAPTIVE, GOES_ON, [MIXTURES[3], 3]),
        (_ForgetsWhatItObserved, ADAPTIVE, GOES_ON, [MIXTURES[3], 3]),
        (_LearnsNothing, ADAPTIVE, "what_an_adaptive_order_observes_changes_what_comes", []),
    ],
)
def test_the_contract_fails_for_an_order_that_breaks_it(
    order: type[Any], config: OrderConfig, test: str, arguments: list[Any]
) -> None:
    suite = contract_of(order, config)
    with pytest.raises(AssertionError):
        getattr(suite, f"test_{test}")(*arguments)
