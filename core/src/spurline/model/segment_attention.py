"""Causal attention within each segment of a padding-free stream, for any Hugging Face model.

Place on the way: `TokenStream` -> decoder -> attention in every layer -> hidden states. `attend_segments` computes it;
`segment_attention` is its form for transformers, registered there as "spurline_segments", on purpose without a mask
function: transformers then builds no mask and does not guess packing from positions. It knows no loss and no batch
layout, only the `SegmentPlan` that the backend passes through the model as the keyword `segment_plan`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from spurline.errors import ModelError
from spurline.model.token_stream import Bucket, SegmentPlan

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch older than 2.10
    varlen_attn = None
if varlen_attn is not None and not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
    varlen_attn = None  # its first versions had neither

ATTENTION_NAME = "spurline_segments"

_REFUSED = ("softcap", "s_aux", "position_bias")
"""Keywords by which models ask for attention that is not plain softmax(QK) V."""

_HALF_PRECISION = (torch.bfloat16, torch.float16)

_observers: list[list[int | None]] = []


@contextmanager
def observed_windows() -> Iterator[list[int | None]]:
    """Collect the sliding window of every attention call made meanwhile, None for full attention."""
    windows: list[int | None] = []
    _observers.append(windows)
    try:
        yield windows
    finally:
        _observers.remove(windows)


@torch.compiler.disable
def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    segment_plan: SegmentPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form transformers calls it: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    _refuse_what_would_be_ignored(module, attention_mask, is_causal, segment_plan, kwargs)
    assert segment_plan is not None
    for windows in _observers:
        windows.append(sliding_window)
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings promote query and key to fp32; convert before anything is copied, as SDPA itself would.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # [T, heads, D]: a view of how the projections lie in memory.
    query, key, value = (part.transpose(1, 2).squeeze(0) for part in (query, key, value))
    output = attend_segments(query, key, value, segment_plan, scaling, sliding_window, dropout)
    return output.unsqueeze(0), None


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: SegmentPlan,
    scaling: float | None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention within each segment: query [T, H, D], key and value [T, K, D] -> [T, H, D].

    T: tokens of the stream, or of this process's part of it where the plan has an exchange, which makes this a
    collective. K divides H. scaling: None for 1 / sqrt(D). window: None for all tokens before a query; else how many it
    sees, itself counted.
    """
    exchange = plan.exchange
    if exchange is not None:
        query, key, value = exchange.to_heads(query, key, value)
    if window is not None and window >= plan.max_length:
        window = None
    if _varlen_kernel_fits(query, key, value, dropout):
        output = _varlen(query, key, value, plan, scaling, window)
    else:
        # split, not slices: the backward of each slice would allocate zeros of the whole stream.
        parts = (part.split(plan.tokens_of_buckets) for part in (query, key, value))
        buckets = zip(plan.buckets, *parts, strict=True)
        outputs = [_attend(bucket, q, k, v, dropout, scaling, window) for bucket, q, k, v in buckets]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if exchange is None else exchange.to_tokens(output)


AttentionInterface.register(ATTENTION_NAME, segment_attention)


def _refuse_what_would_be_ignored(
    module: nn.Module,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    segment_plan: SegmentPlan | None,
    kwargs: dict[str, Any],
) -> None:
    owner = type(module).__name__
    if segment_plan is None:
        raise ModelError(
            f"{owner} does not hand the model's keyword arguments to its attention, so sequences cannot be kept apart. "
            "Use a model whose forward passes **kwargs to the attention function (all recent transformers decoders do)."
        )
    asked = [name for name in _REFUSED if kwargs.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        asked.append("is_causal=False")
    if asked:
        raise ModelError(
            f"{owner} uses {', '.join(asked)}, which packed attention does not compute. "
            "Where the model's config has a field for it, turn it off under model.config_overrides; otherwise choose "
            "another model."
        )


def _varlen_kernel_fits(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in _HALF_PRECISION
        and _is_ampere_or_newer(query.device)
        and dropout == 0.0
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
    )


@cache
def _is_ampere_or_newer(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, scaling: float | None, window: int | None
) -> Tensor:
    assert varlen_attn is not None
    output = varlen_attn(
        query,
        key,
        value,
        plan.cu_seqlens,
        plan.cu_seqlens,
        plan.max_length,
        plan.max_length,
        scale=scaling,
        # (keys to the left, keys to the right); the window of transformers counts the query's own position.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output


def _attend(
    bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    """Causal attention of one bucket, [tokens, heads, D] each. Padding lies in the future of every real query."""
    if bucket.slots is not None:
        query, key, value = (
            _Pad.apply(part, bucket.slots, bucket.count * bucket.length) for part in (query, key, value)
        )
    rows = (bucket.count, bucket.length)
    mask = None if window is None or window >= bucket.length else _band(bucket.length, window, query.device)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and (mask is not None or query.dtype not in _HALF_PRECISION):
        # With grouped heads CUDA has no memory-efficient kernel for these cases and would materialize all scores.
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        grouped = False
    query, key, value = (part.unflatten(0, rows).transpose(1, 2) for part in (query, key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    output = output.transpose(1, 2).flatten(0, 1)
    return output if bucket.slots is None else _Unpad.apply(output, bucket.slots)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length], True where a query sees a key: itself and the window - 1 positions before."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return causal.triu_(1 - window)


class _Pad(torch.autograd.Function):
    """Spread rows over zeroed slots. Its own backward, since the gradient of padding is exactly zero here: a plain
    gather both ways, where index_select would allocate zeros and add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        return rows.new_zeros((num_slots, *rows.shape[1:])).index_copy_(0, slots, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grads[0].index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    """The inverse of `_Pad`."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_slots = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        padded = grads[0].new_zeros((ctx.num_slots, *grads[0].shape[1:]))
        return padded.index_copy_(0, slots, grads[0]), None
