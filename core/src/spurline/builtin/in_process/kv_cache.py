"""Keys and values of the tokens that rows have read, a slot per row.

Place on the way: attention of each layer writes here and reads back. The first slots are in use, without gaps; which
row has which slot is the decoder's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CAPACITY_STEP = 64
"""Tokens by which slots grow, so that a slightly longer row does not move everything."""


class KvCache:
    """Per layer two tensors [slots, heads, capacity, D], made when the layer first writes."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._slots = 0
        self._capacity = 0

    def reserve(self, slots: int, capacity: int, used: int) -> None:
        """Room for so many rows of at most so many tokens. used: slots whose content is kept."""
        if slots <= self._slots and capacity <= self._capacity:
            return
        self._slots = slots
        self._capacity = -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (self._moved(keys, used), self._moved(values, used))

    def write_prompts(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Fill slots from `start` with [rows, heads, tokens, D]."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(keys), self._empty(values))
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored[start : start + new.shape[0], :, : new.shape[2]] = new

    def append(self, layer: int, start: int, lengths: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, D] behind the first `lengths` [rows] tokens of the slots from `start`; these slots."""
        rows = torch.arange(lengths.shape[0], device=lengths.device)
        slots = slice(start, start + lengths.shape[0])
        stored_keys, stored_values = (stored[slots] for stored in self._layers[layer])
        stored_keys[rows, :, lengths] = keys
        stored_values[rows, :, lengths] = values
        return stored_keys, stored_values

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots over others."""
        for stored in (part for parts in self._layers.values() for part in parts):
            stored[list(targets)] = stored[list(sources)]

    def clear(self) -> None:
        """Free the memory."""
        self._layers.clear()
        self._slots = self._capacity = 0

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros: a masked key may be anything but NaN.
        return like.new_zeros((self._slots, like.shape[1], self._capacity, like.shape[3]))

    def _moved(self, stored: Tensor, used: int) -> Tensor:
        moved = self._empty(stored)
        tokens = min(stored.shape[2], self._capacity)
        moved[:used, :, :tokens] = stored[:used, :, :tokens]
        return moved
