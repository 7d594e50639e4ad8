"""Say how the segments of one padding-free token stream are computed by attention.

Place on the way: micro-batch -> SegmentPlan -> attention of every layer. Made once per micro-batch, on the host; the
segments lie in the stream from short to long, so that those of one length are neighbours. Not the attention itself:
that is `segment_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Send = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Bucket:
    """Neighbouring segments that one attention call computes, as `count` rows of `length`.

    tokens: stream tokens in it. slots: int64 [tokens], where each goes in the padded [count * length] layout; None
    when all have the same length, so that a view of the stream is that layout already.
    """

    count: int
    length: int
    tokens: int
    slots: Tensor | None


@dataclass(frozen=True)
class SegmentPlan:
    """The segments of a stream of T tokens.

    cu_seqlens: int32 [S + 1], where each segment starts, and T. max_length: tokens of the longest.
    buckets: cover the stream in order. tokens_of_buckets: their sizes, for `Tensor.split`.
    """

    cu_seqlens: Tensor
    max_length: int
    buckets: tuple[Bucket, ...]
    tokens_of_buckets: tuple[int, ...]

    @property
    def num_segments(self) -> int:
        return self.cu_seqlens.shape[0] - 1


def plan_segments(lengths: NDArray[np.int64], slots_per_call: int, send: Send) -> SegmentPlan:
    """The plan for segments of these lengths, which must not decrease.

    slots_per_call: how many padded slots cost as much as one more attention call; 0 never pads.
    send: moves a host tensor to the device.
    """
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    buckets = tuple(_bucket(lengths[start:stop], send) for start, stop in _cut(lengths, slots_per_call))
    return SegmentPlan(
        cu_seqlens=send(torch.from_numpy(cu_seqlens)),
        max_length=int(lengths[-1]) if len(lengths) else 0,
        buckets=buckets,
        tokens_of_buckets=tuple(bucket.tokens for bucket in buckets),
    )


def _cut(lengths: NDArray[np.int64], slots_per_call: int) -> list[tuple[int, int]]:
    """Half-open ranges of segments: runs of one length, joined with the next while padding is cheaper than a call."""
    if len(lengths) == 0:
        return []
    runs = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    cuts = [0]
    padded_slots = 0
    for start, stop in pairwise(runs[1:]):
        # Joining pads every segment of the bucket to the new length; one that is padded already pays the growth only.
        slots = (stop - cuts[-1]) * int(lengths[start])
        if slots - padded_slots <= slots_per_call:
            padded_slots = slots
        else:
            cuts.append(start)
            padded_slots = 0
    return list(zip(cuts, [*cuts[1:], len(lengths)], strict=True))


def _bucket(lengths: NDArray[np.int64], send: Send) -> Bucket:
    count, longest, tokens = len(lengths), int(lengths[-1]), int(lengths.sum())
    if tokens == count * longest:
        return Bucket(count, longest, tokens, None)
    padding_before = np.arange(count) * longest - (np.cumsum(lengths) - lengths)
    slots = np.arange(tokens) + np.repeat(padding_before, lengths)
    return Bucket(count, longest, tokens, send(torch.from_numpy(slots)))
