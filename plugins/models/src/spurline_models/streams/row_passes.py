"""Run a decoder on padded rows with one segment each, instead of on one stream.

This is for models that mix tokens outside of attention (linear attention, state spaces, convolutions). Rows are padded
on the right, and causal layers do not see later positions, so each segment gets the results that it would get alone.
The cost is one pass per group of similar lengths, and padding. A large pass has at most as much padding as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spurline_models.streams.segment_attention import Unpad
from spurline_models.streams.token_stream import Bucket, SegmentPlan, Send, cut_buckets, plan_segments


@dataclass(frozen=True)
class RowPass:
    """Segments of a stream that the decoder reads in one pass. `tokens` is where they lie in the stream."""

    tokens: slice
    bucket: Bucket
    plan: SegmentPlan

    @property
    def is_real(self) -> Tensor | slice:
        """Return which slots of the flattened rows hold tokens, not padding."""
        return slice(None) if self.bucket.slots is None else self.bucket.slots

    def rows(self, values: Tensor, padding: int = 0) -> Tensor:
        """Lay [T, ...] of the stream out as [rows, length, ...], without gradient."""
        part = values[self.tokens]
        bucket = self.bucket
        if bucket.slots is not None:
            padded = part.new_full((bucket.count * bucket.length, *part.shape[1:]), padding)
            part = padded.index_copy_(0, bucket.slots, part)
        return part.unflatten(0, (bucket.count, bucket.length))

    def positions(self, values: Tensor) -> Tensor:
        """Lay positions [T] out as [rows, length]. They count on in the padding, since a jump would begin a segment."""
        return self.rows(values)[:, :1] + torch.arange(self.bucket.length, device=values.device)

    def stream(self, rows: Tensor) -> Tensor:
        """Bring [rows, length, ...] to [tokens, ...] in the order of the stream."""
        flat = rows.flatten(0, 1)
        return flat if self.bucket.slots is None else Unpad.apply(flat, self.bucket.slots)


def row_passes(plan: SegmentPlan, slots_per_pass: int, send: Send) -> list[RowPass]:
    """Return the passes over a stream, in order. `slots_per_pass` is how many padding slots cost as much as a pass."""
    passes: list[RowPass] = []
    start = 0
    for bucket in cut_buckets(plan.lengths, slots_per_pass, send, most_padding=1.0):
        passes.append(RowPass(slice(start, start + bucket.tokens), bucket, _equal_segments(bucket, send)))
        start += bucket.tokens
    return passes


def idle_pass(after: int, send: Send) -> RowPass:
    """Return a pass over one row of two padding tokens, for a stream of `after` tokens."""
    bucket = Bucket(1, 2, 0, send(torch.zeros(0, dtype=torch.int64)))
    return RowPass(slice(after, after), bucket, _equal_segments(bucket, send))


def _equal_segments(bucket: Bucket, send: Send) -> SegmentPlan:
    return plan_segments(np.full(bucket.count, bucket.length, np.int64), 0, send)
