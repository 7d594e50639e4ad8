"""Compute causal attention within each segment of a padding-free stream, for any Hugging Face model.

`segment_attention` is registered in transformers as "spurline_segments". It has no mask function, so no mask is
built, and transformers does not guess packing from positions. The backend passes the `SegmentPlan` through the model as
the keyword `segment_plan`. Attention with other features, such as softcaps, raises ModelError. Such a model reads
padded rows with its own attention instead (`stream_model.Reading`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from spurline.data.batch import ROUTED_EXPERTS
from spurline.errors import ModelError
from spurline_models.streams.token_stream import Bucket, SegmentPlan

ATTENTION_NAME = "spurline_segments"

_IGNORED = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", ROUTED_EXPERTS)
"""Keywords that attention may ignore, as their tensors repeat the plan or are meant for routers. Any other tensor, such
as a position bias, is refused."""

_HALF_PRECISION = (torch.bfloat16, torch.float16)

_observers: list[list[int | None]] = []


@contextmanager
def observed_windows() -> Iterator[list[int | None]]:
    """Collect the sliding window of every attention call in the context. It is None for full attention."""
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
    s_aux: Tensor | None = None,
    segment_plan: SegmentPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers expects: query [B, H, T, D], key and value [B, K, T, D].

    If B is larger than 1, the rows are joined into one stream. Returns [B, T, H, D].
    """
    _refuse_what_would_be_ignored(module, attention_mask, is_causal, segment_plan, kwargs)
    assert segment_plan is not None
    scores = Scores(scaling, sinks=s_aux, window=sliding_window)
    for windows in _observers:
        windows.append(sliding_window)
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings promote query and key to fp32. Round them now, as SDPA would, before they are copied.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rows = (query.shape[0], query.shape[2])
    # [tokens, heads, D] is the layout of the projections in memory, so these are views.
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    output = attend_segments(query, key, value, segment_plan, scores, dropout)
    return output.unflatten(0, rows), None


@dataclass(frozen=True)
class Scores:
    """Settings of attention scores. The weights of keys are a softmax over `query @ key * scaling`.

    Attributes:
        scaling: The factor of scores. If None, it is 1 / sqrt(D).
        sinks: [H], an additional score of each head in the softmax, without a value vector (gpt-oss).
        window: The number of tokens that a query sees, including itself. If None, it sees all earlier tokens.
    """

    scaling: float | None = None
    sinks: Tensor | None = None
    window: int | None = None

    def for_lengths_up_to(self, length: int) -> Scores:
        """Return the settings, without the window if segments of up to `length` tokens fit into it."""
        return replace(self, window=None) if self.window is not None and self.window >= length else self


def attend_segments(
    query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, scores: Scores, dropout: float = 0.0
) -> Tensor:
    """Attend causally within each segment: query [T, H, D], key and value [T, K, D] -> [T, H, D].

    T is the number of tokens, and K divides H. If the plan has an exchange, each process has T tokens of the stream,
    and the call is a collective.
    """
    exchange = plan.exchange
    if exchange is not None:
        if scores.sinks is not None:
            scores = replace(scores, sinks=exchange.own_heads(scores.sinks))
        query, key, value = exchange.to_heads(query, key, value)
    scores = scores.for_lengths_up_to(plan.max_length)
    if _varlen_kernel_fits(query, key, value, scores, dropout):
        output = _varlen(query, key, value, plan, scores)
    else:
        # Use `split`, since the backward pass of each slice would allocate zeros for the whole stream.
        tokens = [bucket.tokens for bucket in plan.buckets]
        parts = (part.split(tokens) for part in (query, key, value))
        buckets = zip(plan.buckets, *parts, strict=True)
        outputs = [_attend(bucket, q, k, v, scores, dropout) for bucket, q, k, v in buckets]
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
            f"{owner} does not pass the model's keyword arguments to its attention, so sequences cannot be kept apart. "
            "Use a model whose forward passes **kwargs to the attention function (all recent transformers decoders do)."
        )
    asked = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _IGNORED]
    if kwargs.get("softcap") is not None:
        asked.append("softcap")
    if attention_mask is not None:
        asked.append("attention_mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        asked.append("is_causal=False")
    if asked:
        raise ModelError(
            f"{owner} uses {', '.join(asked)}, which packed attention does not compute. "
            "If the model's config has a field for it, turn it off under model.config_overrides. Otherwise choose "
            "another model."
        )


def _varlen_kernel_fits(query: Tensor, key: Tensor, value: Tensor, scores: Scores, dropout: float) -> bool:
    widths = {part.shape[-1] for part in (query, key, value)}
    return query.is_cuda and not padding_reason(query.device, query.dtype, widths, scores.sinks is not None, dropout)


def padding_reason(
    device: torch.device, dtype: torch.dtype, widths: Collection[int], has_sinks: bool, dropout: float
) -> str | None:
    """Return why a GPU computes attention on padded rows, or None if it runs torch's kernel for streams.

    `widths` are the sizes of the heads of queries, keys and values. `dtype` is that of computations.
    """
    if dtype not in _HALF_PRECISION:
        return f"it is computed in {str(dtype).removeprefix('torch.')}, and the kernel needs backend.precision: bf16"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    if has_sinks:
        return "the model has attention sinks"
    if dropout:
        return "the model's config asks for dropout of attention"
    if len(widths) > 1 or max(widths) > 256 or max(widths) % 8:
        return f"its heads have sizes of {sorted(widths)}, and the kernel needs one multiple of 8 up to 256"
    return None


def _varlen(query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, scores: Scores) -> Tensor:
    output = varlen_attn(
        query,
        key,
        value,
        plan.cu_seqlens,
        plan.cu_seqlens,
        plan.max_length,
        plan.max_length,
        scale=scores.scaling,
        # (keys to the left, keys to the right). The window of transformers counts the query's own position.
        window_size=(-1 if scores.window is None else scores.window - 1, 0),
        **_for_grouped_heads(varlen_attn),
    )
    assert isinstance(output, Tensor)
    return output


@cache
def _for_grouped_heads(kernel: Callable[..., Any]) -> dict[str, Any]:
    # In torch 2.11 the kernel takes fewer heads of keys than of queries without being told.
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


def _attend(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, scores: Scores, dropout: float) -> Tensor:
    """Attend within one bucket of [tokens, heads, D]. Padding comes after a row's tokens, so no token sees it."""
    query, key, value = (bucket.rows(part).transpose(1, 2) for part in (query, key, value))
    output = _attend_rows(query, key, value, scores.for_lengths_up_to(bucket.length), dropout)
    return bucket.flat(output.transpose(1, 2))


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, scores: Scores, dropout: float) -> Tensor:
    """Attend causally within rows: query [B, H, T, D], key and value [B, K, T, D] -> [B, H, T, D].

    Rows longer than the window are cut into blocks of its size, so that time and memory grow linearly.
    """
    if scores.window is None:
        return _attend_visible(query, key, value, None, scores, dropout)
    length, size = query.shape[2], scores.window
    # Fill with zeros up to a multiple of the window.
    query, key, value = (F.pad(part, (0, 0, 0, -length % size)) for part in (query, key, value))
    # The first block sees only itself. Each later block sees keys of itself and of the block before.
    first = _attend_visible(query[:, :, :size], key[:, :, :size], value[:, :, :size], None, scores, dropout)
    query = _blocks(query[:, :, size:], size)
    key, value = (
        torch.cat([_blocks(part[:, :, :-size], size), _blocks(part[:, :, size:], size)], dim=2) for part in (key, value)
    )
    visible = torch.ones(size, 2 * size, dtype=torch.bool, device=query.device).tril_(size).triu_(1)
    others = _attend_visible(query, key, value, visible, scores, dropout)
    others = others.unflatten(0, (first.shape[0], -1))
    return torch.cat([first, others.transpose(1, 2).flatten(2, 3)], dim=2)[:, :, :length]


def _blocks(rows: Tensor, size: int) -> Tensor:
    """Reshape [B, H, blocks * size, D] to [B * blocks, H, size, D]."""
    return rows.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)


_SINK_WIDTH = 8
"""Number of columns added to each head for the sink. Half-precision kernels need head sizes divisible by 8."""


def _attend_visible(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores: Scores, dropout: float
) -> Tensor:
    """Attend from queries [B, H, Q, D] to keys [B, K, T, D]. `visible` is [Q, T]; if None, attention is causal.

    A sink is an extra first key, which all queries see. Its score is the head's sink, and its value is 0. So that any
    kernel can compute this, queries get an extra column with the sink. The extra key has a 1 in this column, and all
    other keys have a 0. With an extra first query, each query still sees the keys up to its own.
    """
    scaling, value_width = scores.scaling, value.shape[-1]
    if scores.sinks is not None:
        width = query.shape[-1]
        scaling = scaling or 1 / math.sqrt(width)
        column = (scores.sinks.to(query.dtype) / scaling).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
        query = F.pad(torch.cat([query, column], dim=-1), (0, _SINK_WIDTH - 1, 1, 0))
        sink = key.new_zeros(width + _SINK_WIDTH)
        sink[width] = 1
        key = torch.cat([sink.expand(*key.shape[:2], 1, -1), F.pad(key, (0, _SINK_WIDTH))], dim=2)
        value = F.pad(value, (0, _SINK_WIDTH, 1, 0))
        visible = None if visible is None else F.pad(visible, (1, 0, 1, 0), value=True)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and (visible is not None or query.dtype not in _HALF_PRECISION):
        # CUDA has no memory-efficient kernel with grouped heads for these cases, and would keep all scores.
        heads = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(heads, dim=1) for part in (key, value))
        grouped = False
    output = F.scaled_dot_product_attention(
        query, key, value, visible, dropout, is_causal=visible is None, scale=scaling, enable_gqa=grouped
    )
    return output if scores.sinks is None else output[:, :, 1:, :value_width]
