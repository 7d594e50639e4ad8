"""Put low-rank adapters into a model, and read merged weights back out of it.

peft replaces linear layers in place; the causal model itself stays the object that the backend drives. Only imported
by runs that ask for adapters, since peft is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spurline.errors import ModelError, listing
from spurline.model.configs import LoraConfig

try:
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer
except ImportError as error:
    raise ModelError("backend.lora needs peft. Run `pip install spurline[lora]`.") from error


def add_adapters(causal: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Freeze the weights and add trainable adapters, whose initial values depend on `seed` alone."""
    torch.manual_seed(seed)
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only multiplies by it; whole numbers are its habit
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    dtype = causal.dtype
    try:
        peft.get_peft_model(causal, settings)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, module in causal.named_modules() if isinstance(module, nn.Linear)}
        raise ModelError(f"backend.lora.target_modules: {error}\nLinear modules: {listing(linear)}.") from error
    # peft makes adapters in fp32 also for a float64 model.
    nn.Module.to(causal, dtype=dtype)
    _refuse_adapted_tied_weights(causal)


def adapted_layers(causal: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    """(module name, layer) of every layer that carries an adapter."""
    for name, module in causal.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def merged_weight(layer: BaseTunerLayer) -> Tensor:
    """Base weight plus adapter, as a new tensor; the layer stays as it is."""
    weight = layer.get_base_layer().weight
    assert isinstance(weight, Tensor)
    for adapter in layer.active_adapters:
        weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)  # type: ignore[operator]
    return weight


@contextmanager
def adapters_off(causal: nn.Module) -> Iterator[None]:
    """The model as it was before training."""
    layers = [layer for _, layer in adapted_layers(causal)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _refuse_adapted_tied_weights(causal: PreTrainedModel) -> None:
    ends = [causal.get_input_embeddings(), causal.get_output_embeddings()]
    adapted = [end for end in ends if isinstance(end, BaseTunerLayer)]
    plain = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    if adapted and None not in plain and plain[0].weight is plain[1].weight:
        raise ModelError(
            "backend.lora.target_modules names the embedding or the output layer, which share one weight in this "
            "model: an adapter on one of them cannot be merged. Leave them out, or use target_modules: all-linear."
        )
