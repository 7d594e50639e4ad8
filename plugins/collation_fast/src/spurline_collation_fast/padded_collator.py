"""Collator `padded`, vectorized: one sample per row, equal to `spurline.builtin.padded_collator`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from spurline.builtin.configs import PaddedCollatorConfig
from spurline.data.batch import TrainingBatch
from spurline.data.packing import round_up
from spurline.data.token_store import TokenView
from spurline.protocols.collator import ParallelLayout
from spurline_collation_fast.flat_segments import FlatSegments, flat_samples
from spurline_collation_fast.kernels import Kernels, Table, best_kernels
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
