"""What is known of a model's training before its weights are there: refused here, and not once they have been loaded.

In: the settings of a run. The model is built without memory, and changed as backends change it.
"""

from __future__ import annotations

from torch import nn

from spurline.config.run_config import RunConfig
from spurline.model.architecture import build_without_memory, load_model_config
from spurline.model.experts.router_balance import balance_coefficient
from spurline.model.experts.router_replay import no_routers
from spurline.model.experts.routers import find_routers
from spurline.model.freezing import freeze_parameters
from spurline.model.loading import check_settings, quiet_loading
from spurline.model.streams.stream_model import StreamModel
from spurline.model.streams.value_model import put_value_head
from spurline.optimizers.groups import check_groups


def check_trainable(run: RunConfig) -> None:
    """Raise ConfigError or ModelError for a model that cannot be trained with these settings, whatever its weights.

    Its losses and frequencies, decoder and routers, what `model.freeze` and adapters name, the groups of optimizers. A
    plan asks, and a run before it loads weights.
    """
    config, model = load_model_config(run.model), run.model
    causal = build_without_memory(config, model)
    name = f"{model.path} ({type(causal).__name__})"
    check_settings(config, name, run.data.max_length)
    with quiet_loading():
        # Refuses one without a decoder or an output layer.
        StreamModel(causal)
    if run.source.replays_experts and not find_routers(causal):
        raise no_routers(name)
    if model.router_aux_loss is not None:
        balance_coefficient(model, causal)
    adapters = run.backend.adapters
    freeze_parameters(causal, model.freeze)
    if adapters is not None:
        # Only runs with adapters have the library for them.
        from spurline.model.adapters.lora import add_adapters

        add_adapters(causal, adapters, run.seed)
    check_groups(run.optimizer, _trained(causal))
    if run.critic is not None:
        put_value_head(causal)
        check_groups(run.critic.optimizer, _trained(causal), "critic.optimizer")


def _trained(causal: nn.Module) -> list[str]:
    return [name for name, parameter in causal.named_parameters() if parameter.requires_grad]
