"""Register the components of the plugin `models`. Imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.losses import configs as losses
from spurline_models.optimizers import configs as optimizers

PLUGIN = Plugin("models", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    add = registry.add
    add(optimizers.AdamWConfig, "spurline_models.optimizers.torch_optimizers:make_adamw", default=True)
    add(optimizers.AdamW8BitConfig, "spurline_models.optimizers.torch_optimizers:make_adamw_8bit")
    add(optimizers.SgdConfig, "spurline_models.optimizers.torch_optimizers:make_sgd")
    add(optimizers.MuonConfig, "spurline_models.optimizers.torch_optimizers:Muon")
    add(optimizers.ConstantConfig, "spurline_models.optimizers.schedules:Constant")
    add(optimizers.LinearConfig, "spurline_models.optimizers.schedules:Linear")
    add(optimizers.CosineConfig, "spurline_models.optimizers.schedules:Cosine", default=True)
    add(optimizers.WsdConfig, "spurline_models.optimizers.schedules:WarmupStableDecay")
    add(LocalBackendConfig, "spurline_models.local.backend:LocalBackend", default=True)
    add(losses.CrossEntropyConfig, "spurline_models.losses.cross_entropy:CrossEntropy", default=True)
    add(losses.DynamicFineTuningConfig, "spurline_models.losses.cross_entropy:DynamicFineTuning")
    add(losses.LossEvaluationConfig, "spurline_models.losses.held_out:LossEvaluation", default=True)
