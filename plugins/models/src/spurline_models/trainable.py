"""Check that a model can be trained with the run's settings, before its weights are loaded."""

from __future__ import annotations

from torch import nn

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import ConfigError, ModelError, listing
from spurline.plugins.registry import Registry
from spurline.protocols.loss import Loss
from spurline.protocols.stateful import Stateful
from spurline_models.adapters.adapter_targets import is_target
from spurline_models.architecture import build_without_memory, load_model_config, output_layer
from spurline_models.backend_config import adapters_of
from spurline_models.experts.router_balance import balance_coefficient
from spurline_models.experts.router_replay import no_routers
from spurline_models.experts.routers import find_routers
from spurline_models.frozen import check_frozen
from spurline_models.loading import check_config, quiet_loading
from spurline_models.losses.distributions import ReadsLogits
from spurline_models.optimizers.groups import check_groups, freeze_parameters
from spurline_models.streams.stream_model import StreamModel, dropout_rates, put_value_head


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
    if adapters is not None and model.head == "score" and "reference" in run.frozen_roles - model.frozen.keys():
        raise ConfigError.at(
            "backend.lora",
            "trains the score head beside the adapters, so without the adapters the model is not the one that the run "
            "began with. Add model.frozen.reference with the same path and head: score, or train all weights.",
        )
    check_frozen(run)


def check_reproducible(model: ModelConfig) -> None:
    """Raise ConfigError if the model draws random numbers while it is trained."""
    rates = dropout_rates(load_model_config(model))
    if rates:
        raise ConfigError.at(
            "model.config_overrides",
            f"leaves {listing([f'{name} at {rate:g}' for name, rate in rates.items()])} in the model. What a sequence "
            "draws depends on the ranks and micro-batches, so backend.sums: reproducible needs 0. Set it here.",
        )


def _trained(causal: nn.Module) -> list[str]:
    return [name for name, parameter in causal.named_parameters() if parameter.requires_grad]


def check_losses(run: RunConfig, registry: Registry) -> None:
    """Raise ConfigError if a loss of this run keeps a state. Backends with ranks call this before ranks start."""
    refuse_stateful(registry.create("loss", run.loss))
    if run.trained_critic is not None:
        refuse_stateful(registry.create("loss", run.trained_critic.loss), "critic.loss")


def check_reading(run: RunConfig, registry: Registry) -> None:
    """Raise ConfigError if a loss reads logits of a model that has none, or that would not be the right one."""
    critic = run.trained_critic
    if critic is not None and isinstance(registry.create("loss", critic.loss), ReadsLogits):
        raise ConfigError.at("critic.loss", "reads logits, and a critic has a value head instead. Choose another loss.")
    loss = registry.create("loss", run.loss)
    if not isinstance(loss, ReadsLogits):
        return
    if run.model.head == "score":
        raise ConfigError.at("loss", "reads logits, and a model with head: score has none. Choose another loss.")
    unnamed = set(loss.reads_logits) - run.loss.roles
    if unnamed:
        raise ConfigError.at(
            "loss",
            f"reads the logits of {listing(unnamed)}, which {type(run.loss).__name__}.roles does not name. Let `roles` "
            "return all roles of `reads_logits`.",
        )
    adapters = adapters_of(run)
    if adapters is None or adapters.target_modules == "all-linear" or "reference" in run.model.frozen:
        return
    causal = build_without_memory(load_model_config(run.model), run.model)
    head = output_layer(causal)
    names = [name for name, module in causal.named_modules() if module is head and is_target(name, adapters)]
    if names and "reference" in loss.reads_logits:
        raise ConfigError.at(
            "backend.lora.target_modules",
            f"names the output layer {names[0]}. The loss reads the logits of the reference, which would be made by "
            "the adapted output layer. Leave it out, or add model.frozen.reference with the same path.",
        )


def refuse_stateful(loss: Loss, key: str = "loss") -> None:
    """Raise ConfigError if a loss keeps a state, which would differ between ranks. `key` is its config section."""
    if isinstance(loss, Stateful):
        raise ConfigError.at(
            key,
            f"is made by {type(loss).__name__}, which keeps a state. Each rank would have a different state. Choose "
            "a loss without a state, or backend.name: local.",
        )
