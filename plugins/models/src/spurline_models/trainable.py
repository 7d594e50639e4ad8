"""Check that a model can be trained with the run's settings, before its weights are loaded."""

from __future__ import annotations

from torch import nn

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, ModelError
from spurline.plugins.registry import Registry
from spurline.protocols.loss import Loss
from spurline.protocols.stateful import Stateful
from spurline_models.architecture import build_without_memory, load_model_config
from spurline_models.backend_config import adapters_of
from spurline_models.experts.router_balance import balance_coefficient
from spurline_models.experts.router_replay import no_routers
from spurline_models.experts.routers import find_routers
from spurline_models.frozen import check_frozen
from spurline_models.loading import check_config, quiet_loading
from spurline_models.optimizers.groups import check_groups, freeze_parameters
from spurline_models.streams.stream_model import StreamModel, put_value_head


def check_trainable(run: RunConfig) -> None:
    """Raise ConfigError or ModelError if the model cannot be trained with these settings."""
    model = run.model
    try:
        causal = build_without_memory(load_model_config(model), model)
    except ModelError:
        if model.init == "random":
            # The model's code may read its new weights, which are on the meta device here and cannot be read.
            return
        raise
    check_config(causal, model.path, run.data.max_length)
    with quiet_loading():
        # This raises ModelError for a model without a decoder or an output layer.
        StreamModel(causal)
    if run.source.facts.replays_experts and not find_routers(causal):
        raise no_routers(f"{model.path} ({type(causal).__name__})")
    if model.router_aux_loss is not None:
        balance_coefficient(model, causal)
    adapters = adapters_of(run)
    freeze_parameters(causal, model.freeze)
    if adapters is not None:
        # Only runs with adapters need peft.
        from spurline_models.adapters.lora import add_adapters

        add_adapters(causal, adapters, run.seed)
    check_groups(run.optimizer, _trained(causal))
    if run.trained_critic is not None:
        put_value_head(causal)
        check_groups(run.trained_critic.optimizer, _trained(causal), "critic.optimizer")
    check_frozen(run)


def _trained(causal: nn.Module) -> list[str]:
    return [name for name, parameter in causal.named_parameters() if parameter.requires_grad]


def check_losses(run: RunConfig, registry: Registry) -> None:
    """Raise ConfigError if a loss of this run keeps a state. Backends with ranks call this before ranks start."""
    refuse_stateful(registry.create("loss", run.loss))
    if run.trained_critic is not None:
        refuse_stateful(registry.create("loss", run.trained_critic.loss), "critic.loss")


def refuse_stateful(loss: Loss, key: str = "loss") -> None:
    """Raise ConfigError if a loss keeps a state, which would differ between ranks. `key` is its config section."""
    if isinstance(loss, Stateful):
        raise ConfigError.at(
            key,
            f"is made by {type(loss).__name__}, which keeps a state. Each rank would have a different state. Choose "
            "a loss without a state, or backend.name: local.",
        )
