"""Pack the tensors of a bucket into one buffer on any device, with a checksum of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spurline_async_rl.weights.buckets import aligned, end_of
from spurline_models.weight_buckets import TensorPlace

_WORDS_AT_ONCE = 1 << 17
"""Words of 8 bytes that a checksum multiplies at a time."""


def pack(
    weights: Iterable[tuple[str, Tensor]], buffer: Tensor | None, device: torch.device
) -> tuple[Tensor, tuple[TensorPlace, ...]]:
    """Return a buffer, uint8 [bytes] on the device, and the place of each weight in it.

    buffer: of an earlier bucket; it is written over if it is large enough.
    """
    held = list(weights)
    places: list[TensorPlace] = []
    end = 0
    for name, tensor in held:
        places.append(TensorPlace.of(name, tensor, aligned(end)))
        end = end_of(places[-1:])
    buffer = room(buffer, max(aligned(end), 8), device)
    for (_, view), (_, tensor) in zip(unpack(buffer, places), held, strict=True):
        view.copy_(tensor.detach())
    return buffer, tuple(places)


def room(buffer: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Return a buffer of at least so many bytes: this one if it is large enough."""
    if buffer is not None and len(buffer) >= size:
        return buffer
    return torch.empty(size, dtype=torch.uint8, device=device)


def unpack(buffer: Tensor, places: Sequence[TensorPlace]) -> list[tuple[str, Tensor]]:
    """Return names and weights, as views of the buffer."""
    weights: list[tuple[str, Tensor]] = []
    for place in places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        flat = buffer[place.offset : end_of([place])].view(dtype)
        weights.append((place.name, flat.view(place.shape)))
    return weights


def checksum(buffer: Tensor) -> int:
    """Return a checksum of the buffer, whose bytes are a multiple of 8, computed where it is.

    It is the sum of its words of 8 bytes, each times an odd number of its own, modulo 2**64. A single word that changes
    changes the sum, as an odd number has an inverse.
    """
    words = buffer.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        odd = torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=buffer.device)
        total += (part * odd).sum()
    return int(total.item())
