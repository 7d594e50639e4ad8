"""Collator `rollouts`: put one turn of a trajectory into each row. It is the readable reference for faster collators.

It lays out tokenized samples as `padded` does, because a run may evaluate on plain text between RL steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spurline.data.batch import TrainingBatch
from spurline.data.collators.layout import Segment, turn_segments
from spurline.data.collators.packing import round_up
from spurline.data.collators.padded import PaddedCollator

if TYPE_CHECKING:
    from spurline_rl.trajectory import Trajectory


class RolloutsCollator(PaddedCollator):
    """Puts a prompt and its response into each row. The loss is on the response tokens whose mask is 1."""

    def collate_rollouts(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        # Mini-batches are cut between prompts, so rows keep their order. Padding rows come last.
        rows: list[list[Segment]] = [[segment] for segment in turn_segments(trajectories)]
        rows += [[] for _ in range(round_up(max(len(rows), 1), self._layout.data) - len(rows))]
        return self._lay_out(rows)
