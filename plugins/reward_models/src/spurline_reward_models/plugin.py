"""Register the components of `reward_models`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_reward_models.configs import (
    BradleyTerryConfig,
    JudgeConfig,
    ModelRewardConfig,
    ScoredStepsConfig,
    StepRewardConfig,
)

PLUGIN = Plugin("reward_models", api=API_VERSION, requires=("preference", "rl"))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(BradleyTerryConfig, "spurline_reward_models.losses:BradleyTerry")
    registry.add(StepRewardConfig, "spurline_reward_models.losses:StepReward")
    registry.add(ScoredStepsConfig, "spurline_reward_models.source:ScoredStepsSource")
    registry.add(ModelRewardConfig, "spurline_reward_models.reward:ModelReward")
    registry.add(JudgeConfig, "spurline_reward_models.judge:Judge")
    panel = "spurline_insight.report_panel:ReportPanelConfig"
    registry.add_to("report_panel", panel, "spurline_reward_models.panel:RewardModelPanel", name="reward_model")
