"""Turn rows of a batch into one stream of tokens without padding, and plan attention within its segments.

Padded and packed batches run the same computation, since all padding is dropped. Segments are sorted from short to
long. The layout is computed on the host, once per micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import ROUTED_EXPERTS, SUPPORT, TrainingBatch
from spurline.errors import DataError, listing
from spurline_models.dealing import RankShare, Rows
from spurline_models.device_profile import DeviceProfile

Send = Callable[[Tensor], Tensor]
"""A function that copies a host tensor to the device."""


@dataclass(frozen=True)
class Bucket:
    """Neighbouring segments that one call computes, as `count` rows of `length`, padded on the right.

    Causal layers do not see later positions, so each segment gets the same results as it would alone. `tokens` is their
    number of tokens, and `start` the stream position of the first. `slots` is int64 [tokens], the position of each
    token among the count * length slots. It is None if there is no padding.
    """

    count: int
    length: int
    tokens: int
    slots: Tensor | None
    start: int = 0

    def of(self, values: Tensor) -> Tensor:
        """Return the bucket's part of the values [T, ...] of the stream."""
        return values[self.start : self.start + self.tokens]

    def rows(self, values: Tensor, padding: int = 0) -> Tensor:
        """Arrange values [tokens, ...] as [count, length, ...]."""
        if self.slots is not None:
            values = cast(Tensor, _Pad.apply(values, self.slots, self.count * self.length, padding))
        return values.unflatten(0, (self.count, self.length))

    def flat(self, rows: Tensor) -> Tensor:
        """Turn [count, length, ...] back into [tokens, ...]."""
        flat = rows.flatten(0, 1)
        return flat if self.slots is None else cast(Tensor, _Unpad.apply(flat, self.slots))


class _Pad(torch.autograd.Function):
    """A copy of rows into slots of a tensor that is filled with `padding`.

    The backward pass gathers the slots, and does not need the rows. `index_copy_` alone would keep the rows for it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, num_slots: int, padding: int) -> Tensor:
        ctx.save_for_backward(slots)
        return rows.new_full((num_slots, *rows.shape[1:]), padding).index_copy_(0, slots, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return grads[0].index_select(0, slots), None, None, None


class _Unpad(torch.autograd.Function):
    """The inverse of `_Pad`. Slots are distinct, so the backward pass copies gradients instead of adding them up."""

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


class AttentionExchange(Protocol):
    """An exchange between processes that share one stream, around attention.

    Outside of attention, each process has a part of the tokens. Within attention, it has all tokens and some heads.
    `to_heads` and `to_tokens` are differentiable collectives.
    """

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange [tokens of this process, all heads, D] for [T, some heads, D]."""
        ...

    def to_tokens(self, output: Tensor) -> Tensor:
        """Exchange [T, some heads, D] for [tokens of this process, all heads, D]."""
        ...

    def own_heads(self, values: Tensor) -> Tensor:
        """Return the values [heads] of this process's heads. This is not a collective."""
        ...


@dataclass(frozen=True)
class SegmentPlan:
    """The segments of a stream of T tokens.

    Attributes:
        lengths: int64 [S] on the host, not decreasing.
        cu_seqlens: int32 [S + 1], the start of each segment, and T at the end.
        max_length: Tokens of the longest segment.
        buckets: Buckets that cover the stream in order.
        exchange: The exchange with other processes. None if one process has the whole stream.
    """

    lengths: NDArray[np.int64]
    cu_seqlens: Tensor
    max_length: int
    buckets: tuple[Bucket, ...]
    exchange: AttentionExchange | None = None

    @property
    def num_segments(self) -> int:
        return self.cu_seqlens.shape[0] - 1


@dataclass(frozen=True)
class TokenStream:
    """A stream of T tokens in S segments. N tokens have loss. All tensors but `batch_index` are on the device.

    Attributes:
        input_ids: [1, T].
        position_ids: [1, T].
        plan: The segments.
        source: [N], the stream position before each loss token, increasing. The hidden state there predicts the token.
        host_source: int64 [N] on the host, the values of `source`.
        targets: [N], token ids.
        weights: [N], loss weights.
        segment_index: [N], number of the token's segment, from 0.
        columns: Further token columns at the N positions.
        batch_index: [N] on CPU, the index of the token in the flattened [rows, length] of the batch.
        routed_experts: int16 [T, layers, top_k], the experts that the engine chose; -1 for tokens that it did not
            compute. If None, routers choose.
        support: [N, K], ids of the tokens among which each token was sampled, padded with -1. If None, among all.
        num_fill: Number of tokens at the beginning of the stream that belong to no sample.
        is_idle: Whether the stream is a dummy, which a rank without rows runs so that collectives match.
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: SegmentPlan
    source: Tensor
    host_source: NDArray[np.int64]
    targets: Tensor
    weights: Tensor
    segment_index: Tensor
    columns: dict[str, Tensor]
    batch_index: Tensor
    routed_experts: Tensor | None = None
    support: Tensor | None = None
    num_fill: int = 0
    is_idle: bool = False

    def at_tokens(self) -> TokenStream:
        """Return the stream with the hidden states of the loss tokens themselves, instead of those before them."""
        return replace(self, source=self.source + 1, host_source=self.host_source + 1)

    @classmethod
    def idle(cls, columns: Collection[str], profile: DeviceProfile) -> TokenStream:
        """Make the smallest stream: two tokens, the second of them with loss weight 0. Columns are 0."""
        zero = profile.send(torch.zeros(1, dtype=torch.int64))
        weights = profile.send(torch.zeros(1, dtype=profile.weight_dtype))
        return cls(
            input_ids=profile.send(torch.zeros(1, 2, dtype=torch.int64)),
            position_ids=profile.send(torch.arange(2)).unsqueeze(0),
            plan=plan_segments(np.array([2]), profile.slots_per_attention_call, profile.send),
            source=zero,
            host_source=np.zeros(1, np.int64),
            targets=zero,
            weights=weights,
            segment_index=zero,
            columns=dict.fromkeys(columns, weights),
            batch_index=torch.zeros(1, dtype=torch.int64),
            num_fill=2,
            is_idle=True,
        )

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_loss_tokens(self) -> int:
        return self.batch_index.shape[0]


def check_columns(batch: TrainingBatch, needed: Collection[str]) -> None:
    missing = [name for name in needed if name not in batch.tokens]
    if missing:
        raise DataError(
            f"The loss needs {listing(missing)}, which this run's batches do not have. "
            "Choose another `loss`, or a `source` that provides them. source.carry passes numbers in the data's rows "
            "on to the loss."
        )


def check_tokens(batch: TrainingBatch, vocabulary: int) -> None:
    """Raise DataError for a token beyond the model's embeddings."""
    # Padding tokens may have any id, since they are dropped.
    tokens = batch.tokens["input_ids"][batch.tokens["segment_ids"] > 0]
    if tokens.numel() and int(tokens.max()) >= vocabulary:
        raise DataError(
            f"The batch has token {int(tokens.max())}, and the model knows 0 to {vocabulary - 1}. Set model.tokenizer "
            "to the model's own, or remove tokens without embeddings from the data and the chat template."
        )


def token_stream(
    batch: TrainingBatch, rows: Rows, columns: Collection[str], profile: DeviceProfile
) -> TokenStream | None:
    """Make one stream of the chosen rows, or return None if none of their tokens has loss.

    `columns` are gathered at positions with loss.
    """
    index, lengths = _stream_order(batch, rows)
    send, take = profile.send, profile.take
    weights = batch.tokens["loss_weights"].flatten()[index]
    target_positions = torch.nonzero(weights).flatten()
    if len(target_positions) == 0:
        return None
    batch_index = index[target_positions]
    input_ids = take(batch.tokens["input_ids"].flatten(), index)
    segment_index = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))[target_positions]
    experts, support = batch.tokens.get(ROUTED_EXPERTS), batch.tokens.get(SUPPORT)
    return TokenStream(
        # Values are sent in a narrow dtype, and widened on the device.
        input_ids=send(input_ids).long().unsqueeze(0),
        position_ids=send(take(batch.tokens["position_ids"].flatten(), index)).long().unsqueeze(0),
        plan=plan_segments(lengths, profile.slots_per_attention_call, send),
        source=send(target_positions - 1),
        host_source=target_positions.numpy() - 1,
        targets=send(take(input_ids, target_positions)).long(),
        weights=send(weights[target_positions].to(profile.weight_dtype)),
        segment_index=send(segment_index),
        columns={name: send(take(batch.tokens[name].flatten(0, 1), batch_index)) for name in columns},
        batch_index=batch_index,
        routed_experts=None if experts is None else send(take(experts.flatten(0, 1), index)),
        support=None if support is None else send(take(support.flatten(0, 1), batch_index)).long(),
    )


def share_streams(
    share: RankShare, columns: Collection[str], profile: DeviceProfile
) -> Iterator[tuple[Rows, TokenStream]]:
    """Yield (rows of the mini-batch, stream) per micro-batch of a rank. If no token has loss, the stream is idle."""
    for rows in share.microbatches:
        stream = token_stream(share.batch, rows, columns, profile) if len(rows) else None
        yield share.rows[rows], TokenStream.idle(columns, profile) if stream is None else stream


def _stream_order(batch: TrainingBatch, rows: Rows) -> tuple[Tensor, NDArray[np.int64]]:
    """Return the flat batch index of each stream token, and the segment lengths, from short to long."""
    index = torch.nonzero(batch.tokens["segment_ids"][torch.from_numpy(rows)].flatten()).flatten()
    # Turn the flat index among the chosen rows into the flat index in the whole batch.
    row_shift = torch.from_numpy((rows - np.arange(len(rows))) * batch.length)
    index += row_shift[index // batch.length]
    lengths = batch.segments["length"].take(rows).values.astype(np.int64)
    assert int(lengths.sum()) == len(index), f"segment lengths sum to {lengths.sum()}, but {len(index)} tokens have one"
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(lengths, kind="stable")
    lengths = lengths[order]
    new_starts = np.cumsum(lengths) - lengths
    source = np.arange(len(index)) + np.repeat(starts[order] - new_starts, lengths)
    return index[torch.from_numpy(source)], lengths


def plan_segments(lengths: NDArray[np.int64], slots_per_call: int, send: Send) -> SegmentPlan:
    """Return the plan for segments of these lengths, which must not decrease.

    `slots_per_call` is the number of padding slots that cost as much time as an attention call. If it is 0,
    nothing is padded.
    """
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return SegmentPlan(
        lengths=lengths,
        cu_seqlens=send(torch.from_numpy(cu_seqlens)),
        max_length=int(lengths[-1]) if len(lengths) else 0,
        buckets=cut_buckets(lengths, slots_per_call, send),
    )


def cut_buckets(
    lengths: NDArray[np.int64], slots_per_call: int, send: Send, *, most_padding: float = math.inf
) -> tuple[Bucket, ...]:
    """Return buckets that cover segments of these lengths, which must not decrease.

    Buckets of more than `slots_per_call` slots have at most `most_padding` padding slots per token.
    """
    ranges = _cut(lengths, slots_per_call, most_padding)
    return tuple(_bucket(lengths[start:stop], int(lengths[:start].sum()), send) for start, stop in ranges)


def _cut(lengths: NDArray[np.int64], slots_per_call: int, most_padding: float) -> list[tuple[int, int]]:
    """Cut segments into ranges whose segments are equally long. Join neighbours if padding costs less than a call."""
    if len(lengths) == 0:
        return []
    runs = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    ends = np.cumsum(lengths)
    cuts = [0]
    padded_slots = 0
    for start, stop in pairwise(runs[1:]):
        # Joining pads every segment of the bucket to the new length. Only the added slots count.
        slots = (stop - cuts[-1]) * int(lengths[start])
        tokens = int(ends[stop - 1] - ends[cuts[-1]] + lengths[cuts[-1]])
        is_mostly_tokens = slots <= max(slots_per_call, (1 + most_padding) * tokens)
        if slots - padded_slots <= slots_per_call and is_mostly_tokens:
            padded_slots = slots
        else:
            cuts.append(start)
            padded_slots = 0
    return list(zip(cuts, [*cuts[1:], len(lengths)], strict=True))


def _bucket(lengths: NDArray[np.int64], begin: int, send: Send) -> Bucket:
    count, longest, tokens = len(lengths), int(lengths[-1]), int(lengths.sum())
    if tokens == count * longest:
        return Bucket(count, longest, tokens, None, begin)
    padding_before = np.arange(count) * longest - (np.cumsum(lengths) - lengths)
    slots = np.arange(tokens) + np.repeat(padding_before, lengths)
    return Bucket(count, longest, tokens, send(torch.from_numpy(slots)), begin)
