"""Collators `padded` and `rollouts`, one sequence per row: a sample, or a turn of a trajectory. The readable reference.

`rollouts` lays out tokenized samples as `padded` does, so that a run may evaluate on plain text between RL steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spurline.data.batch import TrainingBatch
from spurline.data.collators.layout import Segment, lay_out, turn_segments
from spurline.data.collators.packing import round_up, spread_over_ranks
from spurline.data.configs import PaddedCollatorConfig
from spurline.data.token_store import TokenView
from spurline.protocols.collator import ParallelLayout

if TYPE_CHECKING:
    from spurline.rl.trajectory import Trajectory


class PaddedCollator:
    """Rows are as long as the longest sample, rounded up; shorter ones are filled on `pad_side`."""

    def __init__(self, config: PaddedCollatorConfig, pad_token_id: int, layout: ParallelLayout) -> None:
        self._config = config
        self._pad_token_id = pad_token_id
        self._layout = layout

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        length = self._row_length(samples.lengths().tolist())
        rows = spread_over_ranks([[position] for position in range(len(samples))], self._layout.data)
        return lay_out(
            [[self._segment(samples, position, length) for position in row] for row in rows],
            length,
            self._pad_token_id,
        )

    def _row_length(self, lengths: Sequence[int]) -> int:
        return round_up(max([1, *lengths]), math.lcm(self._config.pad_to_multiple_of, self._layout.align_to))

    def _segment(self, samples: TokenView, position: int, length: int) -> Segment:
        tokens = samples.tokens(position)
        start = self._start(len(tokens), length)
        return Segment(tokens, samples.loss_mask(position), start, samples.uid(position))

    def _start(self, num_tokens: int, length: int) -> int:
        return length - num_tokens if self._config.pad_side == "left" else 0


class RolloutsCollator(PaddedCollator):
    """prompt + response per row; loss on the response tokens whose mask is 1."""

    def collate_rollouts(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        segments = turn_segments(trajectories)
        length = self._row_length([len(segment.tokens) for segment in segments])
        # Rows keep their order: the prompt boundaries of mini-batches depend on it. Padding rows come last.
        rows: list[list[Segment]] = [[self._placed(segment, length)] for segment in segments]
        rows += [[] for _ in range(round_up(max(len(rows), 1), self._layout.data) - len(rows))]
        return lay_out(rows, length, self._pad_token_id)

    def _placed(self, segment: Segment, length: int) -> Segment:
        return replace(segment, start=self._start(len(segment.tokens), length))
