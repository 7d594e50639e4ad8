"""All orders keep the contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spurline.data.orders.configs import (
    CurriculumOrderConfig,
    LengthGroupedOrderConfig,
    SequentialOrderConfig,
    UniformOrderConfig,
)
from spurline.data.orders.epochs import CurriculumOrder, LengthGroupedOrder, SequentialOrder, UniformOrder
from spurline.protocols.order import SampleFacts
from spurline.testing import OrderContract
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
