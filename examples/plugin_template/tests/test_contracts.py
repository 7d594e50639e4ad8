"""Apply Spurline's contracts to this plugin. Each class inherits the tests, and makes the object to test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Parameter

from spurline.testing import PluginContract
from spurline_insight.testing import ReportPanelContract
from spurline_models.testing import LossContract, OptimizerContract
from spurline_plugin_template.config import FocalConfig, LionConfig, StepTimesPanelConfig
from spurline_plugin_template.focal_loss import FocalLoss
from spurline_plugin_template.lion import Lion
from spurline_plugin_template.panel import StepTimesPanel


class TestPlugin(PluginContract):
    plugin_module = "spurline_plugin_template.plugin"


class TestFocalLoss(LossContract):
    def make_loss(self) -> FocalLoss:
        return FocalLoss(FocalConfig())


class TestLion(OptimizerContract):
    def make_config(self, **settings: Any) -> LionConfig:
        return LionConfig(**settings)

    def make_optimizer(self, config: LionConfig, named_parameters: Mapping[str, Parameter]) -> Lion:
        return Lion(config, named_parameters)


class TestStepTimesPanel(ReportPanelContract):
    def make_panel(self) -> StepTimesPanel:
        return StepTimesPanel(StepTimesPanelConfig())
