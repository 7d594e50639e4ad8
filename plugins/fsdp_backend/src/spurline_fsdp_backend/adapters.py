"""LoRA adapters in a sharded model: frozen weights in the dtype of their files or in another one, adapters in fp32.

transformers loads a model without adapters. The model with adapters then takes over its shards, without a copy.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from spurline_models.adapters.lora import initial_adapters
from spurline_models.weights import without_adapters
from spurline_ranks.pieces import Box, held_box


def take_over(adapted: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Give the adapted model, which has no values yet, the parameters and buffers of the same model without adapters.

    Both are sharded alike. Parameters are frozen as the adapted model has them.
    """
    places = _places(adapted)
    # Tied parameters are one tensor under two names, and stay so.
    for name, value in plain.named_parameters(remove_duplicate=False):
        owner, leaf = places[name]
        value.requires_grad_(owner.get_parameter(leaf).requires_grad)
        owner.register_parameter(leaf, value)
    for name, buffer in plain.named_buffers():
        owner, leaf = places[name]
        owner.register_buffer(leaf, buffer, persistent=leaf not in owner._non_persistent_buffers_set)


def draw_adapters(adapted: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Give every adapter its initial values, which are the same in every backend: each rank takes its part."""
    for name, whole in initial_adapters(adapted, seed):
        value = adapted.get_parameter(name)
        path, _, leaf = name.rpartition(".")
        assert isinstance(value, DTensor), name
        part = whole[held_box(value).slices_in(Box.whole(value.shape))]
        local = part.to(device, value.dtype).contiguous()
        shard = DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
        adapted.get_submodule(path).register_parameter(leaf, Parameter(shard))


def _places(adapted: PreTrainedModel) -> dict[str, tuple[nn.Module, str]]:
    """Return the module that holds each parameter or buffer and its name there, by the name without adapters."""
    places: dict[str, tuple[nn.Module, str]] = {}
    for path, module in adapted.named_modules():
        for leaf in (*module._parameters, *module._buffers):
            places[without_adapters(f"{path}.{leaf}" if path else leaf)] = (module, leaf)
    return places
