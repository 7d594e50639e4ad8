"""Add low-rank adapters to a model, and read merged weights or the adapters from it.

peft replaces linear layers in place, so the model stays the same object. peft is an optional dependency, so only runs
that train adapters import this module.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, ModelError, listing, suggestion
from spurline.trackers.readout import quantity
from spurline_models.adapters.adapter_targets import is_target, unadaptable
from spurline_models.architecture import ScalarHead, build_without_memory, load_model_config, output_layer
from spurline_models.configs import LoraConfig, no_peft, quiet_bitsandbytes

quiet_bitsandbytes()
try:
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer
except ImportError as error:
    raise no_peft() from error

ADAPTER = "default"
"""PEFT's default name of an adapter. Each model here has one adapter, with this name."""


def add_adapters(causal: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Freeze the weights and add trainable adapters, which are fp32 unless the weights have a wider dtype.

    The adapters get the values of `initial_adapters`, except on device `meta`, which holds no values.

    Raises:
        ConfigError: If an entry of `target_modules` names no module.
        ModelError: If `target_modules` names a module that cannot carry an adapter.
    """
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    left_out, head = unadaptable(causal), output_layer(causal)
    for name, reason in left_out.items():
        if targets != "all-linear" and is_target(name, lora):
            raise ModelError(
                f"backend.lora.target_modules names {name}, which cannot carry an adapter: {reason}. Leave it out, or "
                "use target_modules: all-linear."
            )
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only multiplies by it
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=list(left_out) or None,
        use_rslora=lora.rslora,
        # With the task of classification, PEFT would replace the head.
        task_type=None if isinstance(head, ScalarHead) else "CAUSAL_LM",
    )
    dtype = torch.float32
    for parameter in causal.parameters():
        dtype = torch.promote_types(dtype, parameter.dtype)
    names = [name for name, _ in causal.named_modules()]
    linear = {name.rpartition(".")[2] for name, module in causal.named_modules() if isinstance(module, nn.Linear)}
    try:
        with warnings.catch_warnings():
            # Ignore warnings about calls that only PEFT could change.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            # Without `low_cpu_mem_usage`, PEFT would initialise adapters on the host even for a model on `meta`.
            peft.get_peft_model(causal, settings, low_cpu_mem_usage=causal.device.type == "meta")
    except ValueError as error:
        _refuse_unmatched(settings, lora, names, linear)
        raise ModelError(f"backend.lora.target_modules: {error}\nLinear modules: {listing(linear)}.") from error
    _refuse_unmatched(settings, lora, names, linear)
    _refuse_adapted_tied_weights(causal)
    for parameter in causal.parameters():
        if parameter.requires_grad:
            # peft makes adapters in fp32 even for a float64 model.
            parameter.data = parameter.data.to(dtype)
    if isinstance(head, ScalarHead):
        # The head is new, so it is trained beside the adapters.
        head.weight.requires_grad_(True)
    if causal.device.type != "meta":
        with torch.no_grad():
            for name, value in initial_adapters(causal, seed):
                causal.get_parameter(name).copy_(value)


def leave_inputs_to_autocast(causal: nn.Module) -> None:
    """Let autocast alone convert the inputs of adapters. PEFT would widen them to fp32 for autocast to round again.

    Afterwards, the model must run under autocast, or with inputs in the dtype of the adapters.
    """
    for _, layer in adapted_layers(causal):
        vars(layer)["cast_input_dtype_enabled"] = False


def initial_adapters(causal: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, initial value in fp32 on CPU) of every adapter matrix, one at a time.

    A value depends only on the seed and the parameter's name, so all ranks draw equal values. As in PEFT, one matrix
    of each adapter is zero, so a new adapter does not change the model's outputs.
    """
    for layer_name, part, parameter in adapter_parameters(causal):
        name = f"{layer_name}.{part}"
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        value = torch.zeros(parameter.shape, dtype=torch.float32)
        if part.startswith("lora_A."):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        elif part.startswith("lora_embedding_B."):
            nn.init.normal_(value, generator=generator)
        else:
            assert part.startswith(("lora_B.", "lora_embedding_A.")), part
        yield name, value


def adapter_parameters(causal: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield (layer name, name in the layer, parameter) for every parameter of every adapter."""
    for layer_name, _ in adapted_layers(causal):
        for part, parameter in causal.get_submodule(layer_name).named_parameters():
            # `base_layer` may be an adapted layer itself. Then `adapted_layers` yields it separately.
            if not part.startswith("base_layer."):
                yield layer_name, part, parameter


def adapter_settings(causal: PreTrainedModel, model: ModelConfig) -> dict[str, Any]:
    """Return the content of `adapter_config.json` for an adapter of this model."""
    found: Any = causal.peft_config
    settings = found[ADAPTER].to_dict()
    alpha = settings["lora_alpha"]
    own = {
        "base_model_name_or_path": model.path,
        "revision": model.revision,
        "inference_mode": True,
        # Some programs that read `adapter_config.json` expect an integer.
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
    }
    return json.loads(json.dumps(settings | own, default=sorted))


def adapted_layers(causal: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    """Yield (module name, layer) of every layer that carries an adapter."""
    for name, module in causal.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def merged_weight(layer: BaseTunerLayer, base: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a base weight plus its adapter's update as a new tensor, in fp32 or a wider dtype of the layer's tensors.

    Args:
        layer: The layer that carries the adapter.
        base: The name of the adapted weight in the layer.
        tensors: The layer's unsharded tensors, keyed by their names within the layer.
    """
    dtype = torch.float32
    for tensor in tensors.values():
        dtype = torch.promote_types(dtype, tensor.dtype)
    exact = {f"layer.{name}": tensor.to(dtype) for name, tensor in tensors.items()}
    return exact[f"layer.{base}"] + functional_call(_Delta(layer), exact, (ADAPTER,))


class _Delta(nn.Module):
    """A module whose forward pass returns peft's product of an adapter's matrices, for `functional_call`."""

    def __init__(self, layer: BaseTunerLayer):
        super().__init__()
        self.layer: Any = layer

    def forward(self, adapter: str) -> Tensor:
        return self.layer.get_delta_weight(adapter)


@contextmanager
def adapters_off(causal: nn.Module) -> Iterator[None]:
    """Let the model compute without its adapters in the context."""
    layers = [layer for _, layer in adapted_layers(causal)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def notes(model: ModelConfig, lora: LoraConfig) -> list[str]:
    """Describe which modules get adapters, and which ones `all-linear` leaves out. Raises UserError."""
    causal = build_without_memory(load_model_config(model), model)
    total = sum(parameter.numel() for parameter in causal.parameters())
    reasons: dict[str, set[str]] = {}
    for name, reason in unadaptable(causal).items():
        reasons.setdefault(reason, set()).add(name.rpartition(".")[2])
    add_adapters(causal, lora, 0)
    adapted = Counter(
        # An adapter of experts that are stored as one tensor has the tensor's name in `parameter_name`.
        str(getattr(layer, "parameter_name", name.rpartition(".")[2]))
        for name, layer in adapted_layers(causal)
    )
    trained = sum(parameter.numel() for parameter in causal.parameters() if parameter.requires_grad)
    where = ", ".join(f"{count} x {name}" for name, count in adapted.items())
    counts = f"{quantity(trained)} trained beside {quantity(total)} frozen parameters"
    said = [f"LoRA rank {lora.rank} on {where}: {counts}"]
    if reasons and lora.target_modules == "all-linear":
        left_out = "; ".join(f"{listing(names)} ({reason})" for reason, names in reasons.items())
        said.append(f"lora.target_modules: all-linear leaves out {left_out}.")
    return said


def _refuse_unmatched(settings: peft.LoraConfig, lora: LoraConfig, names: list[str], linear: set[str]) -> None:
    """Raise ConfigError if an entry of `target_modules` names no module.

    PEFT itself raises an error only if no entry matches. It moves entries that name parameters to `target_parameters`.
    """
    for number, target in enumerate(() if lora.target_modules == "all-linear" else lora.target_modules):
        is_parameter = settings.target_parameters and target not in (settings.target_modules or ())
        if not is_parameter and not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError.at(
                f"backend.lora.target_modules.{number}",
                f"is {target!r}, but no module of the model has this name.{suggestion(target, linear)} "
                f"Linear modules: {listing(linear)}.",
            )


def _refuse_adapted_tied_weights(causal: PreTrainedModel) -> None:
    ends = [causal.get_input_embeddings(), output_layer(causal)]
    adapted = [end for end in ends if isinstance(end, BaseTunerLayer)]
    plain = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    if adapted and None not in plain and plain[0].weight is plain[1].weight:
        raise ModelError(
            "backend.lora.target_modules names the embedding or the output layer. They share one weight here, so "
            "an adapter on one of them cannot be merged. Leave them out, or use target_modules: all-linear."
        )
