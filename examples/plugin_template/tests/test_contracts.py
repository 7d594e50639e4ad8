"""The contracts that Spurline ships, applied to this plugin: subclass, say what to test, done."""

from __future__ import annotations

from spurline.testing import LossContract, PluginContract, ReportPanelContract
from spurline_plugin_template.config import FocalConfig, StepTimesPanelConfig
from spurline_plugin_template.focal_loss import FocalLoss
from spurline_plugin_template.panel import StepTimesPanel


class TestPlugin(PluginContract):
    plugin_module = "spurline_plugin_template.plugin"


class TestFocalLoss(LossContract):
    def make_loss(self) -> FocalLoss:
        return FocalLoss(FocalConfig())


class TestStepTimesPanel(ReportPanelContract):
    def make_panel(self) -> StepTimesPanel:
        return StepTimesPanel(StepTimesPanelConfig())
