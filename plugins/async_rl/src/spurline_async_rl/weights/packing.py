"""Divide weights into buckets, and pack the tensors of a bucket into one buffer on any device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from spurline_models.weight_buckets import TensorPlace

_ALIGNMENT = 64


def cut(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Divide weights, in order, into lists of at most `max_bytes`. A larger tensor is alone in its list."""
    held: list[tuple[str, Tensor]] = []
    used = 0
    for name, tensor in weights:
        if held and used + tensor.nbytes > max_bytes:
            yield held
            held, used = [], 0
        held.append((name, tensor))
        used += tensor.nbytes
    if held:
        yield held


def places_of(weights: Iterable[tuple[str, Tensor]]) -> tuple[TensorPlace, ...]:
    places: list[TensorPlace] = []
    end = 0
    for name, tensor in weights:
        places.append(TensorPlace.of(name, tensor, -(-end // _ALIGNMENT) * _ALIGNMENT))
        end = end_of(places[-1:])
    return tuple(places)


def end_of(places: Sequence[TensorPlace]) -> int:
    """Return the offset at which the last of these places ends."""
    return max((place.offset + bucket_bytes([place]) for place in places), default=0)


def bucket_bytes(places: Sequence[TensorPlace]) -> int:
    return sum(math.prod(place.shape) * getattr(torch, place.dtype).itemsize for place in places)


def pack(
    weights: Iterable[tuple[str, Tensor]], buffer: Tensor | None, device: torch.device
) -> tuple[Tensor, tuple[TensorPlace, ...]]:
    """Copy weights into a buffer, uint8 [bytes] on the device, and return it with the place of each weight.

    The given buffer is used if it is large enough.
    """
    held = list(weights)
    places = places_of(held)
    buffer = room(buffer, end_of(places), device)
    fill(buffer, places, held)
    return buffer, places


def room(buffer: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Return this buffer if it has `size` bytes, or else a new one."""
    if buffer is not None and len(buffer) >= size:
        return buffer
    return torch.empty(max(size, 1), dtype=torch.uint8, device=device)


def fill(buffer: Tensor, places: Sequence[TensorPlace], weights: Iterable[tuple[str, Tensor]]) -> None:
    for (_, view), (_, tensor) in zip(unpack(buffer, places), weights, strict=True):
        view.copy_(tensor.detach())


def unpack(buffer: Tensor, places: Sequence[TensorPlace]) -> list[tuple[str, Tensor]]:
    """Return names and weights. The weights are views of the buffer."""
    weights: list[tuple[str, Tensor]] = []
    for place in places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        flat = buffer[place.offset : end_of([place])].view(dtype)
        weights.append((place.name, flat.view(place.shape)))
    return weights
