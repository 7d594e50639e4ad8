"""The table of core's own components. This is an ordinary plugin module, loaded first in every run.

Kind and name of each component are those of its config class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from spurline.backends.local.configs import LocalBackendConfig
from spurline.config.cluster import ClusterConfig
from spurline.config.section import ComponentConfig, OnResume, SchemaOfShorthand
from spurline.data import configs as data
from spurline.data import text_configs as text
from spurline.data.orders import configs as orders
from spurline.data.sources.preference_configs import PreferenceSourceConfig
from spurline.evaluation.configs import AnswersEvaluationConfig, LossEvaluationConfig
from spurline.losses import configs as losses
from spurline.optimizers import configs as optimizers
from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline.plugins.registry import CORE
from spurline.protocols.advantage import AdvantageConfig
from spurline.protocols.backend import BackendConfig
from spurline.protocols.collator import CollatorConfig
from spurline.protocols.correction import CorrectionConfig
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.environment import EnvironmentConfig
from spurline.protocols.evaluation import EvaluationConfig
from spurline.protocols.loss import LossConfig
from spurline.protocols.minibatches import MiniBatchesConfig
from spurline.protocols.optimizer import OptimizerConfig
from spurline.protocols.order import OrderConfig
from spurline.protocols.prefetch import PrefetchConfig
from spurline.protocols.report_panel import LongPanelConfig, ReportPanelConfig
from spurline.protocols.reward import RewardConfig
from spurline.protocols.rollout_engine import RolloutEngineConfig
from spurline.protocols.schedule import ScheduleConfig
from spurline.protocols.source import SourceConfig
from spurline.protocols.tokenization import TokenizationConfig
from spurline.protocols.tracker import TrackerConfig
from spurline.protocols.weight_sync import WeightSyncConfig
from spurline.report.configs import ReportConfig
from spurline.rl import hookspecs as rl_hookspecs
from spurline.rl.advantages import configs as advantages
from spurline.rl.configs import RolloutsCollatorConfig, RolloutsEvaluationConfig, RolloutSourceConfig
from spurline.rl.engines.configs import InProcessEngineConfig
from spurline.rl.environments.configs import CustomConfig, SingleTurnConfig, ToolsConfig
from spurline.rl.rewards import configs as rewards
from spurline.trackers import configs as trackers
from spurline.update.configs import ByPromptConfig, WholeBatchConfig

PLUGIN = Plugin(CORE, api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    for config, protocol in _KINDS.items():
        registry.add_kind(config, f"spurline.protocols.{protocol}")
    registry.add_hookspecs(rl_hookspecs)
    registry.add_section(
        "cluster",
        Annotated[ClusterConfig, OnResume.FREE, SchemaOfShorthand(None)],
        held="spurline.ranks.launch:room_on_cluster",
    )
    registry.add_section("report", Annotated[ReportConfig, OnResume.FREE])
    add = registry.add
    add(text.HfDatasetConfig, "spurline.data.datasets.hf_dataset:HfDataset", default=True)
    add(text.HfStreamConfig, "spurline.data.datasets.row_streams:HfStream")
    add(text.SequentialTokenizationConfig, "spurline.data.tokenization:SequentialTokenization", default=True)
    add(data.PaddedCollatorConfig, "spurline.data.collators.padded:PaddedCollator")
    add(data.PackedCollatorConfig, "spurline.data.collators.packed:PackedCollator", default=True)
    add(RolloutsCollatorConfig, "spurline.data.collators.padded:RolloutsCollator")
    add(orders.UniformOrderConfig, "spurline.data.orders.epochs:UniformOrder", default=True)
    add(orders.SequentialOrderConfig, "spurline.data.orders.epochs:SequentialOrder")
    add(orders.LengthGroupedOrderConfig, "spurline.data.orders.length_grouped:LengthGroupedOrder")
    add(orders.CurriculumOrderConfig, "spurline.data.orders.curriculum:CurriculumOrder")
    add(orders.RewardAdaptiveOrderConfig, "spurline.data.orders.reward_adaptive:RewardAdaptiveOrder")
    add(data.SerialPrefetchConfig, "spurline.data.serial_prefetch:SerialPrefetch", default=True)
    add(data.SftSourceConfig, "spurline.data.sources.sft:SftSource", default=True)
    add(text.StreamSourceConfig, "spurline.data.sources.stream:StreamSource")
    add(PreferenceSourceConfig, "spurline.data.sources.preference:PreferenceSource")
    add(RolloutSourceConfig, "spurline.rl.source:RolloutSource")

    add(LossEvaluationConfig, "spurline.evaluation.loss:LossEvaluation")
    add(AnswersEvaluationConfig, "spurline.evaluation.answers:AnswersEvaluation")
    add(RolloutsEvaluationConfig, "spurline.rl.held_out:RolloutsEvaluation")

    add(WholeBatchConfig, "spurline.update.minibatches:WholeBatch", default=True)
    add(ByPromptConfig, "spurline.update.minibatches:ByPrompt")
    add(optimizers.AdamWConfig, "spurline.optimizers.adamw:make_adamw", default=True)
    add(optimizers.AdamW8BitConfig, "spurline.optimizers.adamw:make_adamw_8bit")
    add(optimizers.SgdConfig, "spurline.optimizers.sgd:make_sgd")
    add(optimizers.MuonConfig, "spurline.optimizers.muon:Muon")
    add(optimizers.ConstantConfig, "spurline.optimizers.schedules:Constant")
    add(optimizers.LinearConfig, "spurline.optimizers.schedules:Linear")
    add(optimizers.CosineConfig, "spurline.optimizers.schedules:Cosine", default=True)
    add(optimizers.WsdConfig, "spurline.optimizers.schedules:WarmupStableDecay")
    add(LocalBackendConfig, "spurline.backends.local.backend:LocalBackend", default=True)

    add(losses.CrossEntropyConfig, "spurline.losses.cross_entropy:CrossEntropy", default=True)
    add(losses.DynamicFineTuningConfig, "spurline.losses.cross_entropy:DynamicFineTuning")
    add(losses.DpoConfig, "spurline.losses.dpo:Dpo")
    add(losses.PolicyGradientConfig, "spurline.losses.policy_gradient:PolicyGradient")
    add(losses.PpoConfig, "spurline.losses.ppo:Ppo")
    add(losses.GspoConfig, "spurline.losses.gspo:Gspo")
    add(losses.CispoConfig, "spurline.losses.cispo:Cispo")
    add(losses.SapoConfig, "spurline.losses.sapo:Sapo")
    add(losses.ValueLossConfig, "spurline.losses.value:ValueLoss")
    add(losses.TruncatedImportanceSamplingConfig, "spurline.losses.corrections:TruncatedImportanceSampling")
    add(losses.MaskedImportanceSamplingConfig, "spurline.losses.corrections:MaskedImportanceSampling")
    add(losses.GeometricRejectionConfig, "spurline.losses.corrections:GeometricRejection")
    add(losses.SequenceRejectionConfig, "spurline.losses.corrections:SequenceRejection")

    add(advantages.GrpoConfig, "spurline.rl.advantages.group_relative:Grpo", default=True)
    add(advantages.DrGrpoConfig, "spurline.rl.advantages.group_relative:DrGrpo")
    add(advantages.RlooConfig, "spurline.rl.advantages.group_relative:Rloo")
    add(advantages.MaxRlConfig, "spurline.rl.advantages.group_relative:MaxRl")
    add(advantages.ReinforcePlusPlusConfig, "spurline.rl.advantages.reinforce_pp:ReinforcePlusPlus")
    add(advantages.GaeConfig, "spurline.rl.advantages.gae:Gae")
    add(SingleTurnConfig, "spurline.rl.environments.single_turn:SingleTurn", default=True)
    add(ToolsConfig, "spurline.rl.environments.tools:Tools")
    add(CustomConfig, "spurline.rl.environments.custom:make_custom")
    add(InProcessEngineConfig, "spurline.rl.engines.in_process.engine:InProcessEngine", default=True)
    add(rewards.ExactMatchConfig, "spurline.rl.rewards.matching:ExactMatch")
    add(rewards.PrefixMatchConfig, "spurline.rl.rewards.matching:PrefixMatch")
    add(rewards.FunctionRewardConfig, "spurline.rl.rewards.function:FunctionReward")
    add(rewards.MathVerifyConfig, "spurline.rl.rewards.math_verify:MathVerify")

    add(trackers.JsonlTrackerConfig, "spurline.trackers.jsonl:JsonlTracker")
    add(trackers.ConsoleTrackerConfig, "spurline.trackers.console:ConsoleTracker")
    add(trackers.TensorboardTrackerConfig, "spurline.trackers.tensorboard:TensorboardTracker")
    add(trackers.WandbTrackerConfig, "spurline.trackers.wandb:WandbTracker")
    add(trackers.MlflowTrackerConfig, "spurline.trackers.mlflow:MlflowTracker")
    add(trackers.TrackioTrackerConfig, "spurline.trackers.trackio:TrackioTracker")
    add(trackers.SwanlabTrackerConfig, "spurline.trackers.swanlab:SwanlabTracker")
    add(trackers.OpenTelemetryTrackerConfig, "spurline.trackers.opentelemetry:OpenTelemetryTracker")
    add(trackers.PrometheusTrackerConfig, "spurline.trackers.prometheus:PrometheusTracker")
    for panels, config in ((_REPORT_PANELS, ReportPanelConfig), (_LONG_PANELS, LongPanelConfig)):
        for name, panel in panels.items():
            add(config, f"spurline.report.panels.{panel}", name=name)


_KINDS: Mapping[type[ComponentConfig], str] = {
    DatasetConfig: "dataset:Dataset",
    TokenizationConfig: "tokenization:Tokenization",
    CollatorConfig: "collator:Collator",
    OrderConfig: "order:Order",
    PrefetchConfig: "prefetch:Prefetch",
    MiniBatchesConfig: "minibatches:MiniBatches",
    LossConfig: "loss:Loss",
    AdvantageConfig: "advantage:Advantage",
    CorrectionConfig: "correction:Correction",
    RewardConfig: "reward:Reward",
    EnvironmentConfig: "environment:Environment",
    RolloutEngineConfig: "rollout_engine:RolloutEngine",
    EvaluationConfig: "evaluation:HeldOutEvaluation",
    SourceConfig: "source:BatchSource",
    WeightSyncConfig: "weight_sync:WeightSync",
    OptimizerConfig: "optimizer:Optimizer",
    ScheduleConfig: "schedule:Schedule",
    BackendConfig: "backend:Backend",
    TrackerConfig: "tracker:Tracker",
    ReportPanelConfig: "report_panel:ReportPanel",
}
# In page order; panels without settings share one config class.
_REPORT_PANELS = {
    "summary": "summary:SummaryPanel",
    "health": "summary:HealthPanel",
    "reward": "rollouts:RewardPanel",
    "loss": "learning:LossPanel",
    "evaluation": "learning:EvaluationPanel",
    "preference": "preference:PreferencePanel",
    "groups": "rollouts:GroupsPanel",
    "responses": "rollouts:ResponsesPanel",
    "policy": "policy:PolicyPanel",
    "mismatch": "policy:MismatchPanel",
    "learning_rate": "learning:LearningRatePanel",
    "gradient": "learning:GradientPanel",
    "throughput": "speed:ThroughputPanel",
    "time_split": "speed:TimeSplitPanel",
    "sample_lengths": "data:SampleLengthsPanel",
    "packing": "data:PackingPanel",
}
_LONG_PANELS = {"samples": "samples:SamplesPanel", "config": "summary:ConfigPanel"}
