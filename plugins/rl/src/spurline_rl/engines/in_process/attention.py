"""Attention with a cache of keys and values. A first pass reads whole prompts; each later pass reads a token per row.

Data flow: decoder layer -> attention of a pass, which writes to a `KvCache` and reads it -> hidden states. The
attention is registered with transformers as "spurline_cached". Prompts are computed by `segment_attention`, as in
training. Each row of the cache is a slot for one response. The decoder always uses the first slots, without gaps.

The caches of transformers hold rows of one length, padded on the left. Here each row has its own length, so rows can be
added and removed at any step. Only the last rows move, to fill the gaps of removed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from spurline.errors import ModelError
from spurline_models.streams.segment_attention import segment_attention
from spurline_models.streams.token_stream import SegmentPlan

_CAPACITY_STEP = 64
"""The capacity of slots is a multiple of this many tokens. Larger steps mean fewer copies of all tensors."""


class KvCache:
    """Keys and values: two tensors [slots, heads, capacity, D] per layer, allocated when the layer first writes."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._slots = 0
        self._capacity = 0

    def reserve(self, slots: int, capacity: int, used: int) -> None:
        """Grow to this many slots and tokens per slot. The first `used` slots keep their content."""
        if slots <= self._slots and capacity <= self._capacity:
            return
        self._slots = slots
        self._capacity = -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (self._move_to_new(keys, used), self._move_to_new(values, used))

    def write_prompts(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [rows, heads, tokens, D] to the slots from `start` on."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(keys), self._empty(values))
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored[start : start + new.shape[0], :, : new.shape[2]] = new

    def append(self, layer: int, lengths: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token per row, [rows, heads, D], at index `lengths` [rows] of its slot. Returns the rows' slots."""
        rows = torch.arange(lengths.shape[0], device=lengths.device)
        stored_keys, stored_values = (stored[: lengths.shape[0]] for stored in self._layers[layer])
        stored_keys[rows, :, lengths] = keys
        stored_values[rows, :, lengths] = values
        return stored_keys, stored_values

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for stored in (part for parts in self._layers.values() for part in parts):
            stored[list(targets)] = stored[list(sources)]

    def clear(self) -> None:
        """Free the memory."""
        self._layers.clear()
        self._slots = self._capacity = 0

    def _empty(self, like: Tensor) -> Tensor:
        # Unused positions are zero, since even masked keys must not be NaN.
        return like.new_zeros((self._slots, like.shape[1], self._capacity, like.shape[3]))

    def _move_to_new(self, stored: Tensor, used: int) -> Tensor:
        moved = self._empty(stored)
        tokens = min(stored.shape[2], self._capacity)
        moved[:used, :, :tokens] = stored[:used, :, :tokens]
        return moved


CACHED_ATTENTION = "spurline_cached"


@torch.compiler.disable
def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kv_pass: PromptPass | TokenPass | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention. transformers calls this function and decides its arguments."""
    if kv_pass is None:
        raise ModelError(
            f"{type(module).__name__} does not pass the model's keyword arguments to its attention, so it cannot "
            "generate in_process. Choose a model whose forward passes **kwargs on (all recent decoders do)."
        )
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings promote query and key to fp32. Convert them to autocast's dtype, as SDPA would.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return kv_pass.attend(module, query, key, value, attention_mask=attention_mask, **options), None


AttentionInterface.register(CACHED_ATTENTION, cached_attention)


@contextmanager
def generating(causal: PreTrainedModel, attention: str = CACHED_ATTENTION) -> Iterator[None]:
    """Put the model in evaluation mode, with the attention of this name. Mode and attention are restored afterwards.

    Gradients stay on, since switching them off would affect only the current thread, and callers use several threads.
    """
    before: Any = causal.config._attn_implementation
    was_training = causal.training
    causal.set_attn_implementation(attention)
    causal.eval()
    try:
        yield
    finally:
        causal.train(was_training)
        causal.set_attn_implementation(before)


@dataclass(frozen=True)
class PromptPass:
    """A pass that reads whole prompts, which lie one after another in a stream.

    Attributes:
        source: int64 [rows, longest], the stream position of each token of each row. Rows may share a prompt.
        start: Slot of the first row.
    """

    cache: KvCache
    plan: SegmentPlan
    source: Tensor
    start: int

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        # [rows, K, longest, D]. The positions after a shorter prompt are never read.
        keys, values = (part[0][:, self.source].transpose(0, 1) for part in (key, value))
        self.cache.write_prompts(_layer(module), self.start, keys, values)
        attend: Any = segment_attention
        return attend(module, query, key, value, segment_plan=self.plan, **options)[0]


_NOT_CACHED = ("softcap", "s_aux", "position_bias")
"""Keyword arguments with which models ask for more than plain attention."""


@dataclass(frozen=True)
class TokenPass:
    """A pass that reads the next token of each row.

    Attributes:
        lengths: int64 [rows] on the device, number of cached tokens of each row before this pass.
        widths: Number of tokens of each row after this pass, on the host.
    """

    cache: KvCache
    lengths: Tensor
    widths: Sequence[int]
    _masks: dict[int | None, Tensor] = field(default_factory=dict["int | None", Tensor])

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> Tensor:
        asked = [name for name in _NOT_CACHED if options.get(name) is not None]
        if asked:
            raise ModelError(f"{type(module).__name__} uses {', '.join(asked)}, which the cache does not support.")
        rows, heads = query.shape[:2]
        keys, values = self.cache.append(_layer(module), self.lengths, key[:, :, 0], value[:, :, 0])
        # The query heads that share a key head become the token axis, so keys need not be repeated.
        grouped = query.reshape(rows, key.shape[1], -1, query.shape[-1])
        mask, width = self._mask(sliding_window), max(self.widths)
        first = max(width - sliding_window, 0) if mask is None and sliding_window is not None else 0
        keys, values = keys[:, :, first:width], values[:, :, first:width]
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return output.reshape(rows, 1, heads, -1)

    def _mask(self, window: int | None) -> Tensor | None:
        """Return a mask [rows, 1, 1, width], True for keys that a row sees; None if all rows have the same length."""
        if min(self.widths) == max(self.widths):
            return None
        if window not in self._masks:
            ends = self.lengths.unsqueeze(-1) + 1
            positions = torch.arange(max(self.widths), device=ends.device)
            seen = positions < ends
            if window is not None:
                seen &= positions >= ends - window
            self._masks[window] = seen[:, None, None]
        return self._masks[window]


def _layer(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    assert isinstance(layer, int), f"{type(module).__name__} does not know its layer"
    return layer
