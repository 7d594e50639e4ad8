"""Register the components of `rl`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_rl import configs, evaluation_configs, hookspecs
from spurline_rl.advantages import configs as advantages
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.environments.configs import CustomConfig, SingleTurnConfig
from spurline_rl.losses import configs as losses
from spurline_rl.protocols.advantage import AdvantageConfig
from spurline_rl.protocols.correction import CorrectionConfig
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.reward import RewardConfig
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig
from spurline_rl.protocols.scorer import ScorerConfig
from spurline_rl.protocols.weight_sync import WeightSyncConfig
from spurline_rl.rewards import configs as rewards
from spurline_rl.training_configs import ByPromptConfig, RewardAdaptiveOrderConfig, RolloutCriticConfig

PLUGIN = Plugin("rl", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add_kind(AdvantageConfig, "spurline_rl.protocols.advantage:Advantage")
    registry.add_kind(CorrectionConfig, "spurline_rl.protocols.correction:Correction")
    registry.add_kind(RewardConfig, "spurline_rl.protocols.reward:Reward")
    registry.add_kind(EnvironmentConfig, "spurline_rl.protocols.environment:Environment")
    registry.add_kind(RolloutEngineConfig, "spurline_rl.protocols.rollout_engine:RolloutEngine")
    registry.add_kind(ScorerConfig, "spurline_rl.protocols.scorer:Scorer")
    registry.add_kind(WeightSyncConfig, "spurline_rl.protocols.weight_sync:WeightSync")
    registry.add_hookspecs(hookspecs)
    registry.add_section("critic", RolloutCriticConfig, optional=True)
    registry.add_section("evaluation.generate", evaluation_configs.GenerationEvalConfig, optional=True)
    add = registry.add
    add(configs.RolloutSourceConfig, "spurline_rl.source:RolloutSource")
    add(configs.RolloutsCollatorConfig, "spurline_rl.rollout_batches:RolloutsCollator")
    add(RewardAdaptiveOrderConfig, "spurline_rl.reward_adaptive:RewardAdaptiveOrder")
    add(evaluation_configs.AnswersEvaluationConfig, "spurline_rl.answers:AnswersEvaluation")
    add(evaluation_configs.RolloutsEvaluationConfig, "spurline_rl.held_out:RolloutsEvaluation")
    add(ByPromptConfig, "spurline_rl.rollout_batches:ByPrompt")

    add(losses.PolicyGradientConfig, "spurline_rl.losses.algorithms:PolicyGradient")
    add(losses.PpoConfig, "spurline_rl.losses.algorithms:Ppo")
    add(losses.GspoConfig, "spurline_rl.losses.algorithms:Gspo")
    add(losses.CispoConfig, "spurline_rl.losses.algorithms:Cispo")
    add(losses.SapoConfig, "spurline_rl.losses.algorithms:Sapo")
    add(losses.ValueLossConfig, "spurline_rl.losses.algorithms:ValueLoss")
    add(losses.TruncatedImportanceSamplingConfig, "spurline_rl.losses.corrections:TruncatedImportanceSampling")
    add(losses.MaskedImportanceSamplingConfig, "spurline_rl.losses.corrections:MaskedImportanceSampling")
    add(losses.GeometricRejectionConfig, "spurline_rl.losses.corrections:Rejection")
    add(losses.SequenceRejectionConfig, "spurline_rl.losses.corrections:Rejection")

    add(advantages.GrpoConfig, "spurline_rl.advantages.algorithms:Grpo", default=True)
    add(advantages.DrGrpoConfig, "spurline_rl.advantages.algorithms:DrGrpo")
    add(advantages.RlooConfig, "spurline_rl.advantages.algorithms:Rloo")
    add(advantages.MaxRlConfig, "spurline_rl.advantages.algorithms:MaxRl")
    add(advantages.ReinforcePlusPlusConfig, "spurline_rl.advantages.algorithms:ReinforcePlusPlus")
    add(advantages.GaeConfig, "spurline_rl.advantages.algorithms:Gae")
    add(SingleTurnConfig, "spurline_rl.environments.single_turn:SingleTurn", default=True)
    add(CustomConfig, "spurline_rl.environments.custom:make_custom")
    add(InProcessEngineConfig, "spurline_rl.engines.in_process.engine:InProcessEngine", default=True)
    add(rewards.ExactMatchConfig, "spurline_rl.rewards.matching:ExactMatch")
    add(rewards.FunctionRewardConfig, "spurline_rl.rewards.function:FunctionReward")
    add(rewards.MathVerifyConfig, "spurline_rl.rewards.math_verify:MathVerify")
    for name in ("Reward", "Groups", "Responses", "Policy", "Mismatch"):
        config = "spurline_insight.report_panel:ReportPanelConfig"
        registry.add_to("report_panel", config, f"spurline_rl.panels:{name}Panel", name=name.lower())
