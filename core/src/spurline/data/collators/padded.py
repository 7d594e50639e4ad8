"""Collator `padded`, one sample per row. The readable reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from spurline.data.batch import TrainingBatch
from spurline.data.collators.layout import Segment, lay_out, sample_segments
from spurline.data.collators.packing import round_up, spread_over_ranks
from spurline.data.configs import PaddedCollatorConfig
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
