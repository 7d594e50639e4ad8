"""Core's own optimizers and schedules run through the suites that plugin authors subclass."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from torch.nn import Parameter

from spurline.protocols.optimizer import Optimizer
from spurline.protocols.schedule import Schedule
from spurline_models.optimizers.configs import (
    AdamW8BitConfig,
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    MuonConfig,
    SgdConfig,
    WsdConfig,
)
from spurline_models.optimizers.schedules import Constant, Cosine, Linear, WarmupStableDecay
from spurline_models.optimizers.torch_optimizers import Muon, make_adamw, make_adamw_8bit, make_sgd
from spurline_models.testing import OptimizerContract, ScheduleContract


class AnyOptimizer(OptimizerContract):
    """Makes the optimizer of a subclass: its config class and its factory."""

    config: Any
    make: Any

    def make_config(self, **settings: Any) -> Any:
        return self.config(**settings)

    def make_optimizer(self, config: Any, named_parameters: Mapping[str, Parameter]) -> Optimizer:
        return self.make(config, named_parameters)


class TestAdamW(AnyOptimizer):
    config, make = AdamWConfig, staticmethod(make_adamw)


class TestSgd(AnyOptimizer):
    config, make = SgdConfig, staticmethod(make_sgd)


class TestSgdWithMomentum(AnyOptimizer):
    config, make = partial(SgdConfig, momentum=0.9), staticmethod(make_sgd)


class TestMuon(AnyOptimizer):
    config, make = MuonConfig, Muon


class TestAdamW8Bit(AnyOptimizer):
    config, make = AdamW8BitConfig, staticmethod(make_adamw_8bit)

    @pytest.fixture(autouse=True)
    def bitsandbytes(self) -> None:
        pytest.importorskip("bitsandbytes", reason="the extra optim-8bit is not installed")


class TestConstant(ScheduleContract):
    def make_schedule(self, **settings: Any) -> Schedule:
        return Constant(ConstantConfig(**settings))


class TestLinear(ScheduleContract):
    def make_schedule(self, **settings: Any) -> Schedule:
        return Linear(LinearConfig(**settings))


class TestCosine(ScheduleContract):
    def make_schedule(self, **settings: Any) -> Schedule:
        return Cosine(CosineConfig(min_ratio=0.1, **settings))


class TestWarmupStableDecay(ScheduleContract):
    def make_schedule(self, **settings: Any) -> Schedule:
        return WarmupStableDecay(WsdConfig(decay_ratio=0.3, **settings))
