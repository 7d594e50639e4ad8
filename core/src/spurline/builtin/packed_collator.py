"""Collator `packed`: several samples per row, first-fit-decreasing. The readable reference."""

from __future__ import annotations

import math

from spurline.builtin.configs import PackedCollatorConfig
from spurline.data.batch import TrainingBatch
from spurline.data.layout import Segment, lay_out
from spurline.data.packing import first_fit_decreasing, round_up, spread_over_ranks
from spurline.data.token_store import TokenView
from spurline.errors import DataError
from spurline.protocols.collator import ParallelLayout


class PackedCollator:
    """Each sample's length is rounded up to the alignment before packing, so a row can never overflow."""

    def __init__(self, config: PackedCollatorConfig, pad_token_id: int, layout: ParallelLayout) -> None:
        self._config = config
        self._pad_token_id = pad_token_id
        self._layout = layout
        self._align_to = math.lcm(config.align_to, layout.align_to)

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        aligned = [round_up(int(length), self._align_to) for length in samples.lengths()]
        self._check_lengths(samples, aligned)
        packing = first_fit_decreasing(aligned, self._config.max_tokens)
        rows = spread_over_ranks(packing, self._layout.data)
        used = [sum(aligned[position] for position in row) for row in rows]
        length = max([self._align_to, *used])
        if self._config.pad_to_max or self._layout.pipeline > 1:
            # Pipeline stages exchange activations of one fixed shape.
            length = self._config.max_tokens
        return lay_out(
            [self._segments(samples, row, aligned) for row in rows],
            length,
            self._pad_token_id,
            {"packing/straggler": self._straggler_factor(used)},
        )

    def _segments(self, samples: TokenView, row: list[int], aligned: list[int]) -> list[Segment]:
        segments: list[Segment] = []
        start = 0
        for position in row:
            mask = samples.loss_mask(position)
            segments.append(Segment(samples.tokens(position), mask, start, samples.uid(position)))
            start += aligned[position]
        return segments

    def _straggler_factor(self, used: list[int]) -> float:
        """Tokens of the fullest rank over the mean of all ranks; 1.0 is perfectly even."""
        per_rank = len(used) // self._layout.data
        totals = [sum(used[rank * per_rank : (rank + 1) * per_rank]) for rank in range(self._layout.data)]
        return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0

    def _check_lengths(self, samples: TokenView, aligned: list[int]) -> None:
        for position, length in enumerate(aligned):
            if length > self._config.max_tokens:
                raise DataError(
                    f"Sample {samples.uid(position)} has {int(samples.lengths()[position])} tokens, {length} after "
                    f"alignment, but a packed row holds {self._config.max_tokens}. Raise collator.max_tokens to at "
                    f"least {length}, or lower data.max_length."
                )
