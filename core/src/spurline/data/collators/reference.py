"""The readable reference collators: `padded` has one sample per row, `packed` several samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from spurline.data.batch import TrainingBatch
from spurline.data.collators.layout import Segment, lay_out, sample_segments
from spurline.data.collators.packing import (
    PackingAlgorithm,
    pack,
    refuse_what_cannot_fit,
    round_up,
    spread_over_ranks,
    straggler_factor,
)
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.data.token_store import TokenView
from spurline.protocols.collator import ParallelLayout


class PaddedCollator:
    """Puts each sample in its own row, padded on `pad_side` to the length of the longest sample, rounded up."""

    def __init__(self, config: PaddedCollatorConfig, pad_token_id: int, layout: ParallelLayout) -> None:
        self._config = config
        self._pad_token_id = pad_token_id
        self._layout = layout

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        segments = sample_segments(samples)
        rows = spread_over_ranks([[position] for position in range(len(segments))], self._layout.data)
        return self._lay_out([[segments[position] for position in row] for row in rows])

    def _lay_out(self, rows: Sequence[Sequence[Segment]]) -> TrainingBatch:
        longest = max([1, *(len(segment.tokens) for row in rows for segment in row)])
        length = round_up(longest, math.lcm(self._config.pad_to_multiple_of, self._layout.align_to))
        if self._config.pad_side == "left":
            rows = [[replace(segment, start=length - len(segment.tokens)) for segment in row] for row in rows]
        return lay_out(rows, length, self._pad_token_id)


class PackedCollator:
    """Packs several samples per row. Lengths are rounded up to the alignment first, so that no row overflows."""

    def __init__(self, config: PackedCollatorConfig, pad_token_id: int, layout: ParallelLayout) -> None:
        self._config = config
        self._pad_token_id = pad_token_id
        self._layout = layout
        self._align_to = math.lcm(config.align_to, layout.align_to)
        self._algorithm: PackingAlgorithm = config.algorithm_for(layout.data)

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        segments = sample_segments(samples)
        lengths = [len(segment.tokens) for segment in segments]
        aligned = [round_up(length, self._align_to) for length in lengths]
        refuse_what_cannot_fit(lengths, aligned, self._config.max_tokens, samples.uid)
        rows = pack(aligned, self._config.max_tokens, self._layout.data, self._algorithm)
        used = [sum(aligned[position] for position in row) for row in rows]
        length = max([self._align_to, *used])
        if self._config.pad_to_max or self._layout.pipeline > 1:
            # Pipeline stages exchange activations of one fixed shape.
            length = self._config.max_tokens
        return lay_out(
            [
                _end_to_end([segments[position] for position in row], [aligned[position] for position in row])
                for row in rows
            ],
            length,
            self._pad_token_id,
            {"packing/straggler": straggler_factor(used, self._layout.data)},
        )


def _end_to_end(segments: Sequence[Segment], aligned: Sequence[int]) -> list[Segment]:
    """Return the segments of one row. Each starts at the aligned end of the segment before it."""
    # `zip` leaves out the last value, which is the end of the last segment.
    starts = accumulate(aligned, initial=0)
    return [replace(segment, start=start) for segment, start in zip(segments, starts, strict=False)]
