"""Collator `packed`, vectorized: several samples or turns per row, equal to `spurline.builtin.packed_collator`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spurline.builtin.configs import PackedCollatorConfig
from spurline.data.batch import TrainingBatch
from spurline.data.packing import refuse_what_cannot_fit, straggler_factor
from spurline.data.token_store import TokenView
from spurline.protocols.collator import ParallelLayout
from spurline.rl.trajectory import Trajectory
from spurline_collation_fast.flat_segments import FlatSegments, flat_samples, flat_turns
from spurline_collation_fast.kernels import Kernels, best_kernels
from spurline_collation_fast.row_writer import Placement, RowWriter


class FastPackedCollator:
    """Batches are valid until released; see `TrainingBatch`."""

    def __init__(
        self,
        config: PackedCollatorConfig,
        pad_token_id: int,
        layout: ParallelLayout,
        kernels: Kernels | None = None,
    ) -> None:
        self._config = config
        self._ranks = layout.data
        self._align_to = math.lcm(config.align_to, layout.align_to)
        self._fixed_length = config.pad_to_max or layout.pipeline > 1
        self._kernels = kernels or best_kernels()
        self._writer = RowWriter(pad_token_id, self._kernels)

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        return self.collate_flat(flat_samples(samples), "lower data.max_length")

    def collate_rollouts(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        return self.collate_flat(flat_turns(trajectories), "limit prompts and responses")

    def collate_flat(self, segments: FlatSegments, shorter: str) -> TrainingBatch:
        """shorter: how a user makes segments shorter, for the message about one that cannot fit."""
        capacity = self._config.max_tokens
        aligned = segments.lengths if self._align_to == 1 else -(-segments.lengths // self._align_to) * self._align_to
        if aligned.max(initial=0) > capacity:
            refuse_what_cannot_fit(segments.lengths.tolist(), aligned.tolist(), capacity, segments.name, shorter)
        positions, row_offsets = self._kernels.plan_rows(aligned, capacity, self._ranks, self._config.algorithm)
        ends = np.zeros(len(positions) + 1, np.int64)
        np.cumsum(aligned[positions], out=ends[1:])
        row_starts = ends[row_offsets]
        used = np.diff(row_starts)
        columns = ends[:-1] - np.repeat(row_starts[:-1], np.diff(row_offsets))
        length = capacity if self._fixed_length else max(self._align_to, int(used.max()))
        return self._writer.write(
            segments,
            Placement(positions, row_offsets, columns, length),
            {"packing/straggler": straggler_factor(used.tolist(), self._ranks)},
        )
