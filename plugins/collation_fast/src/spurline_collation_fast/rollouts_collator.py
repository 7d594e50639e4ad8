"""Collator `rollouts`, vectorized: one turn per row, equal to `spurline.builtin.rollouts_collator`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from spurline.data.batch import TrainingBatch
from spurline.data.packing import round_up
from spurline.rl.trajectory import Trajectory
from spurline_collation_fast.flat_segments import FlatSegments, flat_turns
from spurline_collation_fast.padded_collator import FastPaddedCollator, Rows


class FastRolloutsCollator(FastPaddedCollator):
    """Also collates tokenized samples as `padded` does."""

    def collate_rollouts(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """One row a turn, [R, L], in order; padding rows, which make R a multiple of the ranks, come last."""
        return self.collate_flat(flat_turns(trajectories))

    def collate_flat(self, turns: FlatSegments) -> TrainingBatch:
        """The same for turns that are flat already. Rows keep their order; padding rows come last."""
        return self._write(turns, _in_order)


@functools.lru_cache(maxsize=8)
def _in_order(count: int, num_ranks: int) -> Rows:
    num_rows = round_up(max(count, 1), num_ranks)
    return np.arange(count), np.minimum(np.arange(num_rows + 1), count), np.zeros(count, np.int64)
