"""Collator `packed`, vectorized: several samples or turns per row, equal to `spurline.builtin.packed_collator`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spurline.builtin.configs import PackedCollatorConfig
from spurline.data.batch import TrainingBatch
from spurline.data.packing import refuse_what_cannot_fit
from spurline.data.token_store import TokenView
from spurline.protocols.collator import ParallelLayout
from spurline.rl.trajectory import Trajectory
from spurline_collation_fast.flat_segments import FlatSegments, flat_samples, flat_turns
from spurline_collation_fast.kernels import ALGORITHMS, Kernels, best_kernels
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
        self._algorithm = ALGORITHMS.index(config.algorithm)
        self._fixed_length = config.pad_to_max or layout.pipeline > 1
        self._kernels = kernels or best_kernels()
        self._writer = RowWriter(pad_token_id, self._kernels)

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        """Rows of several samples, [R, L], L <= max_tokens, R a multiple of the ranks.

        Raises DataError naming a sample that is longer than `max_tokens` when aligned.
        """
        return self.collate_flat(flat_samples(samples), "lower data.max_length")

    def collate_rollouts(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """The same for turns, each in exactly one segment. Raises DataError naming a turn that cannot fit."""
        return self.collate_flat(flat_turns(trajectories), "limit prompts and responses")

    def collate_flat(self, segments: FlatSegments, shorter: str) -> TrainingBatch:
        """shorter: how a user makes segments shorter, for the message about one that cannot fit."""
        capacity, align_to = self._config.max_tokens, self._align_to
        if segments.lengths.max(initial=0) > capacity // align_to * align_to:
            aligned = -(-segments.lengths // align_to) * align_to
            refuse_what_cannot_fit(segments.lengths.tolist(), aligned.tolist(), capacity, segments.name, shorter)
        positions, row_offsets, columns, used, straggler = self._kernels.pack_rows(
            segments.lengths, align_to, capacity, self._ranks, self._algorithm
        )
        length = capacity if self._fixed_length else max(align_to, used)
        placement = Placement(positions, row_offsets, columns, length)
        return self._writer.write(segments, placement, {"packing/straggler": straggler})
