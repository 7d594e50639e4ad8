"""Core's own optimizers and schedules run through the suites that plugin authors subclass."""

from __future__ import annotations

from collections.abc import Mapping
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


class TestAdamW(OptimizerContract):
    def make_config(self, **settings: Any) -> AdamWConfig:
        return AdamWConfig(**settings)

    def make_optimizer(self, config: AdamWConfig, named_parameters: Mapping[str, Parameter]) -> Optimizer:
        return make_adamw(config, named_parameters)


class TestSgd(OptimizerContract):
    def make_config(self, **settings: Any) -> SgdConfig:
        return SgdConfig(**settings)

    def make_optimizer(self, config: SgdConfig, named_parameters: Mapping[str, Parameter]) -> Optimizer:
        return make_sgd(config, named_parameters)


class TestSgdWithMomentum(TestSgd):
    def make_config(self, **settings: Any) -> SgdConfig:
        return SgdConfig(momentum=0.9, **settings)


class TestMuon(OptimizerContract):
    def make_config(self, **settings: Any) -> MuonConfig:
        return MuonConfig(**settings)

    def make_optimizer(self, config: MuonConfig, named_parameters: Mapping[str, Parameter]) -> Optimizer:
        return Muon(config, named_parameters)


class TestAdamW8Bit(OptimizerContract):
    @pytest.fixture(autouse=True)
    def bitsandbytes(self) -> None:
        pytest.importorskip("bitsandbytes", reason="the extra optim-8bit is not installed")

    def make_config(self, **settings: Any) -> AdamW8BitConfig:
        return AdamW8BitConfig(**settings)

    def make_optimizer(self, config: AdamW8BitConfig, named_parameters: Mapping[str, Parameter]) -> Optimizer:
        return make_adamw_8bit(config, named_parameters)


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
