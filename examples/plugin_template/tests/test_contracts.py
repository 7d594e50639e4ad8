"""Apply Spurline's contracts to this plugin. Each class inherits the tests, and makes the object to test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.nn import Parameter

from spurline.plugins.host import PluginHost
from spurline.testing import PluginContract
from spurline_insight.testing import ReportPanelContract
from spurline_models.testing import LossContract, OptimizerContract
from spurline_plugin_template.anchored_loss import AnchoredLoss
from spurline_plugin_template.brief_reward import BriefReward
from spurline_plugin_template.config import (
    AnchoredConfig,
    BalancedFocalConfig,
    BriefConfig,
    FocalConfig,
    LionConfig,
    RowsWhereConfig,
    StepTimesPanelConfig,
)
from spurline_plugin_template.focal_loss import BalancedFocalLoss, FocalLoss
from spurline_plugin_template.lion import Lion
from spurline_plugin_template.panel import StepTimesPanel
from spurline_plugin_template.rows_where import RowsWhere
from spurline_rl.testing import RewardContract
from spurline_text.configs import HfDatasetConfig
from spurline_text.testing import DatasetContract


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


class TestRowsWhere(DatasetContract):
    def make_dataset(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> RowsWhere:
        # Between the rows that are taken there is another one.
        text = "".join(f'{json.dumps(row)}\n{{"prompt": "another"}}\n' for row in rows)
        (folder / "rows.jsonl").write_text(text, encoding="utf-8")
        wanted = tuple(row["prompt"] for row in rows)
        config = RowsWhereConfig(of=HfDatasetConfig(path=f"{folder}/rows.jsonl"), column="prompt", values=wanted)
        return RowsWhere(config, registry=PluginHost.load([]).registry)


class TestBalancedFocalLoss(LossContract):
    def make_loss(self) -> BalancedFocalLoss:
        return BalancedFocalLoss(BalancedFocalConfig())


class TestAnchoredLoss(LossContract):
    def make_loss(self) -> AnchoredLoss:
        return AnchoredLoss(AnchoredConfig())


class TestBriefReward(RewardContract):
    def make_reward(self) -> BriefReward:
        return BriefReward(BriefConfig(most_characters=20))

    def test_answers_are_scored_together(self) -> None:
        assert self.make_reward().score_many(self.answers()[:3]) == [0.95, 1.0, 0.8]


class TestStepTimesPanel(ReportPanelContract):
    def make_panel(self) -> StepTimesPanel:
        return StepTimesPanel(StepTimesPanelConfig())
