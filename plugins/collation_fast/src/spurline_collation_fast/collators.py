"""Collators `padded`, `packed` and `rollouts`, vectorized: equal bit for bit to those of `spurline.data.collators`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from spurline.data.batch import TrainingBatch
from spurline.data.collators.packing import refuse_what_cannot_fit, round_up
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.data.token_store import TokenView
from spurline.protocols.collator import ParallelLayout
from spurline.rl.trajectory import Trajectory
from spurline_collation_fast.flat_segments import FlatSegments, flat_samples, flat_turns
from spurline_collation_fast.kernels import ALGORITHMS, Kernels, Table, best_kernels
from spurline_collation_fast.row_writer import Placement, RowWriter

Rows = tuple[Table, Table, Table]
"""Sample positions row by row, row offsets into them, and zeros for each: for as many samples, the same every time."""


class FastPaddedCollator:
    """Batches are valid until released; see `TrainingBatch`."""

    def __init__(
        self,
        config: PaddedCollatorConfig,
        pad_token_id: int,
        layout: ParallelLayout,
        kernels: Kernels | None = None,
    ) -> None:
        self._config = config
        self._ranks = layout.data
        self._multiple = math.lcm(config.pad_to_multiple_of, layout.align_to)
        self._writer = RowWriter(pad_token_id, kernels or best_kernels())

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        """One row a sample, [R, L]: R a multiple of the ranks, L the longest sample, rounded up as configured."""
        return self._write(flat_samples(samples), _dealt_out)

    def _write(self, segments: FlatSegments, rows_of: Callable[[int, int], Rows]) -> TrainingBatch:
        """rows_of: which segment each row holds, from the number of segments and of ranks."""
        positions, row_offsets, starts = rows_of(len(segments.lengths), self._ranks)
        # A batch hands its offsets out, and what somebody writes there must not reach the next one.
        row_offsets = row_offsets.copy()
        length = round_up(int(segments.lengths.max(initial=1)), self._multiple)
        if self._config.pad_side == "left":
            starts = length - segments.lengths[positions]
        return self._writer.write(segments, Placement(positions, row_offsets, starts, length))


@functools.lru_cache(maxsize=8)
def _dealt_out(count: int, num_ranks: int) -> Rows:
    """Sample i goes to rank i mod ranks, and the rows of a rank lie together; rows beyond the samples stay empty."""
    sample_of_row = np.arange(round_up(max(count, 1), num_ranks)).reshape(-1, num_ranks).T.ravel()
    filled = sample_of_row < count
    row_offsets = np.zeros(len(filled) + 1, np.int64)
    np.cumsum(filled, out=row_offsets[1:])
    return sample_of_row[filled], row_offsets, np.zeros(count, np.int64)


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
