"""Register core's own components. This is an ordinary plugin module, loaded first in every run."""

from __future__ import annotations

from spurline.builtin import configs, engine_configs, environment_configs, preference_configs, rl_configs
from spurline.hookspecs import hookimpl
from spurline.plugins import API_VERSION, Plugin
from spurline.registry import CORE, ComponentRegistrar

PLUGIN = Plugin(CORE, api=API_VERSION)

_REPORT_PANELS = {
    "summary": "SummaryPanel",
    "health": "HealthPanel",
    "reward": "RewardPanel",
    "loss": "LossPanel",
    "evaluation": "EvaluationPanel",
    "groups": "GroupsPanel",
    "responses": "ResponsesPanel",
    "policy": "PolicyPanel",
    "mismatch": "MismatchPanel",
    "learning_rate": "LearningRatePanel",
    "gradient": "GradientPanel",
    "throughput": "ThroughputPanel",
    "time_split": "TimeSplitPanel",
    "sample_lengths": "SampleLengthsPanel",
    "packing": "PackingPanel",
    "samples": "SamplesPanel",
    "config": "ConfigPanel",
}


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    _register_data(registry)
    _register_training(registry)
    _register_environments(registry)
    _register_algorithms(registry)
    _register_observation(registry)


def _register_data(registry: ComponentRegistrar) -> None:
    builtin = "spurline.builtin"
    registry.add(
        "dataset", "hf", config=configs.HfDatasetConfig, factory=f"{builtin}.hf_dataset:HfDataset", default=True
    )
    registry.add(
        "tokenization",
        "sequential",
        config=configs.SequentialTokenizationConfig,
        factory=f"{builtin}.sequential_tokenization:SequentialTokenization",
        default=True,
    )
    registry.add(
        "collator", "padded", config=configs.PaddedCollatorConfig, factory=f"{builtin}.padded_collator:PaddedCollator"
    )
    registry.add(
        "collator",
        "packed",
        config=configs.PackedCollatorConfig,
        factory=f"{builtin}.packed_collator:PackedCollator",
        default=True,
    )
    registry.add(
        "collator",
        "rollouts",
        config=configs.RolloutsCollatorConfig,
        factory=f"{builtin}.rollouts_collator:RolloutsCollator",
    )
    registry.add(
        "prefetch",
        "serial",
        config=configs.SerialPrefetchConfig,
        factory=f"{builtin}.serial_prefetch:SerialPrefetch",
        default=True,
    )


def _register_training(registry: ComponentRegistrar) -> None:
    builtin = "spurline.builtin"
    registry.add(
        "minibatches",
        "whole",
        config=configs.WholeBatchConfig,
        factory=f"{builtin}.whole_batch:WholeBatch",
        default=True,
    )
    registry.add("minibatches", "by_prompt", config=configs.ByPromptConfig, factory=f"{builtin}.by_prompt:ByPrompt")
    registry.add(
        "loss",
        "cross_entropy",
        config=configs.CrossEntropyConfig,
        factory="spurline.losses.cross_entropy:CrossEntropy",
        default=True,
    )
    registry.add("loss", "dft", config=configs.DynamicFineTuningConfig, factory="spurline.losses.dft:DynamicFineTuning")
    registry.add(
        "source", "sft", config=configs.SftSourceConfig, factory=f"{builtin}.sft_source:SftSource", default=True
    )
    registry.add(
        "source",
        "preference",
        config=preference_configs.PreferenceSourceConfig,
        factory=f"{builtin}.preference_source:PreferenceSource",
    )
    registry.add(
        "source",
        "rollouts",
        config=configs.RolloutSourceConfig,
        factory=f"{builtin}.rollouts.source:RolloutSource",
    )
    registry.add(
        "backend",
        "local",
        config=configs.LocalBackendConfig,
        factory=f"{builtin}.local.backend:LocalBackend",
        default=True,
    )


def _register_environments(registry: ComponentRegistrar) -> None:
    environments, rewards = "spurline.builtin.environments", "spurline.builtin.rewards"
    registry.add(
        "environment",
        "single_turn",
        config=environment_configs.SingleTurnConfig,
        factory=f"{environments}.single_turn:SingleTurn",
        default=True,
    )
    registry.add("environment", "tools", config=environment_configs.ToolsConfig, factory=f"{environments}.tools:Tools")
    registry.add(
        "rollout_engine",
        "in_process",
        config=engine_configs.InProcessEngineConfig,
        factory="spurline.builtin.in_process.engine:InProcessEngine",
        default=True,
    )
    registry.add("reward", "exact_match", config=configs.ExactMatchConfig, factory=f"{rewards}.exact_match:ExactMatch")
    registry.add(
        "reward",
        "prefix_match",
        config=environment_configs.PrefixMatchConfig,
        factory=f"{rewards}.prefix_match:PrefixMatch",
    )
    registry.add(
        "reward",
        "function",
        config=environment_configs.FunctionRewardConfig,
        factory=f"{rewards}.function:FunctionReward",
    )
    registry.add(
        "reward",
        "math_verify",
        config=environment_configs.MathVerifyConfig,
        factory=f"{rewards}.math_verify:MathVerify",
    )


def _register_algorithms(registry: ComponentRegistrar) -> None:
    advantages, losses = "spurline.rl.advantages", "spurline.losses"
    registry.add("advantage", "grpo", config=rl_configs.GrpoConfig, factory=f"{advantages}.grpo:Grpo", default=True)
    registry.add("advantage", "dr_grpo", config=rl_configs.DrGrpoConfig, factory=f"{advantages}.dr_grpo:DrGrpo")
    registry.add("advantage", "rloo", config=rl_configs.RlooConfig, factory=f"{advantages}.rloo:Rloo")
    registry.add("advantage", "maxrl", config=rl_configs.MaxRlConfig, factory=f"{advantages}.maxrl:MaxRl")
    registry.add(
        "advantage",
        "reinforce_pp",
        config=rl_configs.ReinforcePlusPlusConfig,
        factory=f"{advantages}.reinforce_pp:ReinforcePlusPlus",
    )
    registry.add("advantage", "gae", config=rl_configs.GaeConfig, factory=f"{advantages}.gae:Gae")
    registry.add(
        "loss",
        "policy_gradient",
        config=rl_configs.PolicyGradientConfig,
        factory=f"{losses}.policy_gradient:PolicyGradient",
    )
    registry.add("loss", "ppo", config=rl_configs.PpoConfig, factory=f"{losses}.ppo:Ppo")
    registry.add("loss", "gspo", config=rl_configs.GspoConfig, factory=f"{losses}.gspo:Gspo")
    registry.add("loss", "cispo", config=rl_configs.CispoConfig, factory=f"{losses}.cispo:Cispo")
    registry.add("loss", "sapo", config=rl_configs.SapoConfig, factory=f"{losses}.sapo:Sapo")
    registry.add("loss", "dpo", config=preference_configs.DpoConfig, factory=f"{losses}.dpo:Dpo")
    registry.add("loss", "value", config=rl_configs.ValueLossConfig, factory=f"{losses}.value:ValueLoss")
    _register_corrections(registry)


def _register_corrections(registry: ComponentRegistrar) -> None:
    corrections = "spurline.losses.corrections"
    registry.add(
        "correction",
        "tis",
        config=rl_configs.TruncatedImportanceSamplingConfig,
        factory=f"{corrections}.tis:TruncatedImportanceSampling",
    )
    registry.add(
        "correction",
        "mis",
        config=rl_configs.MaskedImportanceSamplingConfig,
        factory=f"{corrections}.mis:MaskedImportanceSampling",
    )
    registry.add(
        "correction",
        "geometric_rejection",
        config=rl_configs.GeometricRejectionConfig,
        factory=f"{corrections}.geometric_rejection:GeometricRejection",
    )
    registry.add(
        "correction",
        "sequence_rejection",
        config=rl_configs.SequenceRejectionConfig,
        factory=f"{corrections}.sequence_rejection:SequenceRejection",
    )


def _register_observation(registry: ComponentRegistrar) -> None:
    builtin = "spurline.builtin"
    trackers = f"{builtin}.trackers"
    registry.add("tracker", "jsonl", config=configs.JsonlTrackerConfig, factory=f"{trackers}.jsonl:JsonlTracker")
    registry.add(
        "tracker", "console", config=configs.ConsoleTrackerConfig, factory=f"{trackers}.console:ConsoleTracker"
    )
    registry.add(
        "tracker",
        "tensorboard",
        config=configs.TensorboardTrackerConfig,
        factory=f"{trackers}.tensorboard:TensorboardTracker",
    )
    registry.add("tracker", "wandb", config=configs.WandbTrackerConfig, factory=f"{trackers}.wandb:WandbTracker")
    for name, panel in _REPORT_PANELS.items():
        registry.add("report_panel", name, config=configs.ReportPanelConfig, factory=f"spurline.report.panels:{panel}")
