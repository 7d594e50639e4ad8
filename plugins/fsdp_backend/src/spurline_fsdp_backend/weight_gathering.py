"""Bring whole tensors together out of the ranks' shards, a few at a time.

Place on the way: shards -> `full_tensor`, on all ranks -> numpy arrays from the first rank. Names outwards are those of
Hugging Face files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

BUCKET_BYTES = 64 << 20
"""How much is gathered at a time."""

Sizes = Sequence[tuple[str, int]]
"""(name in the model, bytes of the whole tensor)."""


def weight_sizes(causal: PreTrainedModel) -> list[tuple[str, int]]:
    """Every weight once, tied ones under their first name."""
    sizes: list[tuple[str, int]] = []
    seen: set[int] = set()
    for name, value in causal.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            sizes.append((name, value.numel() * value.element_size()))
    return sizes


def cut(sizes: Sizes, max_bytes: int = BUCKET_BYTES) -> Iterator[list[str]]:
    """Names in order, in lists of at most so many bytes; a larger tensor alone."""
    names: list[str] = []
    used = 0
    for name, size in sizes:
        if names and used + size > max_bytes:
            yield names
            names, used = [], 0
        names.append(name)
        used += size
    if names:
        yield names


def gather_weights(causal: PreTrainedModel, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    """(hf_name, whole tensor) of these weights, on every rank. A collective."""
    state = causal.state_dict(keep_vars=True)
    whole = {name: gather(state[name].detach()) for name in names}
    return list(revert_weight_conversion(causal, whole).items())


def gather(value: Tensor) -> Tensor:
    """The whole tensor. A collective for a shard."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def as_arrays(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, NDArray]]:
    """As they travel between processes; numpy has no bf16, and fp32 holds it exactly."""
    return [(name, value.float().cpu().numpy()) for name, value in tensors]


def gather_gradients(parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """(name, whole gradient) of each parameter, on every rank. A collective."""
    return [
        (name, gather(torch.zeros_like(value) if value.grad is None else value.grad).detach())
        for name, value in parameters.items()
    ]
