"""Find the modules of a model that cannot carry an adapter. This needs neither weights nor PEFT."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from spurline_models.configs import LoraConfig
from spurline_models.placement.quantized_weights import QuantizedLinear

_READ_PAST = {
    **dict.fromkeys(("mamba", "falcon_mamba"), ("x_proj", "dt_proj", "out_proj")),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), ("out_proj",)),
    "jamba": ("dt_proj",),
}
"""Names of linear layers in state space models, by model type. The code around these layers reads their weights
directly, so an adapter on them would silently not train."""


def unadaptable(causal: PreTrainedModel) -> dict[str, str]:
    """Return the names of the linear modules that cannot carry an adapter, each with a reason."""
    found: dict[str, str] = {}
    read_past = _READ_PAST.get(causal.config.get_text_config().model_type, ())
    for name, module in causal.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if type(module).forward is not nn.Linear.forward and not isinstance(module, QuantizedLinear):
            found[name] = f"{type(module).__name__} does not return what a linear layer returns"
        elif name.rpartition(".")[2] in read_past:
            found[name] = "the state space layer around it reads its weight without the adapter"
    return found


def is_target(name: str, lora: LoraConfig) -> bool:
    """Return whether `target_modules` selects this linear module. The caller leaves out the output layer."""
    targets = lora.target_modules
    return targets == "all-linear" or any(name == target or name.endswith(f".{target}") for target in targets)
