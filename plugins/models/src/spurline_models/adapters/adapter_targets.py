"""Say which modules of a model cannot carry an adapter, and why. Needs neither weights nor PEFT."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from spurline_models.configs import LoraConfig
from spurline_models.placement.quantized_weights import QuantizedLinear

_READ_PAST: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("mamba", "falcon_mamba"), frozenset({"x_proj", "dt_proj", "out_proj"})),
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), frozenset({"out_proj"})
    ),
    "jamba": frozenset({"dt_proj"}),
}
"""Linear layers of state spaces by model type. The mixer or its fast kernel reads their weights itself, so an adapter
would silently not train."""


def unadaptable(causal: PreTrainedModel) -> dict[str, str]:
    """Return the linear modules that cannot carry an adapter by name, each with the reason as a clause."""
    found: dict[str, str] = {}
    read_past = _READ_PAST.get(causal.config.get_text_config().model_type, frozenset())
    for name, module in causal.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if type(module).forward is not nn.Linear.forward and not isinstance(module, QuantizedLinear):
            found[name] = f"{type(module).__name__} does not return what a linear layer returns"
        elif name.rpartition(".")[2] in read_past:
            found[name] = "the state space around it reads its weight past the adapter"
    return found


def is_target(name: str, lora: LoraConfig) -> bool:
    """Return whether the settings ask for an adapter on a module of this name, which is not the output layer."""
    targets = lora.target_modules
    return targets == "all-linear" or any(name == target or name.endswith(f".{target}") for target in targets)
