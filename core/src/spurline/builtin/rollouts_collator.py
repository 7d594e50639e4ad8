"""Collator `rollouts`: one turn of a trajectory per row. The readable reference.

Also collates tokenized samples as `padded` does, so that a run may evaluate on plain text between RL steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spurline.builtin.padded_collator import PaddedCollator
from spurline.data.batch import TrainingBatch
from spurline.data.layout import Segment, lay_out
from spurline.data.packing import round_up
from spurline.data.turn_segments import turn_segments
from spurline.rl.trajectory import Trajectory


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
