"""Declare the plugin, register its components, and implement its hooks. Spurline loads this module.

This module and `config.py` are imported to validate a config, so neither imports torch. The contract tests check this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.plugins import ComponentRegistrar, Plugin, hookimpl
from spurline_plugin_template import hookspecs
from spurline_plugin_template.config import (
    AnchoredConfig,
    BalancedFocalConfig,
    BriefConfig,
    ByDifficultyConfig,
    FocalConfig,
    LionConfig,
    RowsWhereConfig,
    StepTimesPanelConfig,
    TemplateConfig,
)
from spurline_plugin_template.step_times import StepTimes
from spurline_plugin_template.typical_time import MedianConfig, TypicalTime, TypicalTimeConfig

if TYPE_CHECKING:
    from spurline.run.run import Run

# `api` is the version of the plugin interface. Write a number here, so that later versions of Spurline can refuse it.
PLUGIN = Plugin("plugin_template", api=2, config=TemplateConfig)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(FocalConfig, "spurline_plugin_template.focal_loss:FocalLoss")
    registry.add(BalancedFocalConfig, "spurline_plugin_template.focal_loss:BalancedFocalLoss")
    registry.add(AnchoredConfig, "spurline_plugin_template.anchored_loss:AnchoredLoss")
    registry.add(BriefConfig, "spurline_plugin_template.brief_reward:BriefReward")
    registry.add(ByDifficultyConfig, "spurline_plugin_template.by_difficulty:ByDifficulty")
    registry.add(RowsWhereConfig, "spurline_plugin_template.rows_where:RowsWhere")
    registry.add(LionConfig, "spurline_plugin_template.lion:Lion")
    registry.add(StepTimesPanelConfig, "spurline_plugin_template.panel:StepTimesPanel")
    registry.add_kind(TypicalTimeConfig, "spurline_plugin_template.typical_time:TypicalTime")
    registry.add_hookspecs(hookspecs)
    registry.add(MedianConfig, "spurline_plugin_template.typical_time:Median", default=True)


@hookimpl
def on_run_start(run: Run) -> None:
    # A process may train several times, so each run keeps its data in its own object, not in this module.
    settings: TemplateConfig = getattr(run.config, PLUGIN.name)
    typical: TypicalTime = run.loaded.host.registry.create("typical_time", settings.typical)
    step_times = StepTimes(settings, run.directory.path, typical, run.hooks)
    run.loaded.host.attach(step_times, f"{PLUGIN.name}/step_times")
