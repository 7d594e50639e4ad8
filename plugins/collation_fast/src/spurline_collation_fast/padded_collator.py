"""Collator `padded`, vectorized: one sample per row, equal to `spurline.builtin.padded_collator`."""

from __future__ import annotations

import math

import numpy as np

from spurline.builtin.configs import PaddedCollatorConfig
from spurline.data.batch import TrainingBatch
from spurline.data.packing import round_up
from spurline.data.token_store import TokenView
from spurline.protocols.collator import ParallelLayout
from spurline_collation_fast.flat_segments import FlatSegments, Table, flat_samples
from spurline_collation_fast.kernels import Kernels, best_kernels
from spurline_collation_fast.row_writer import Placement, RowWriter


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
        segments = flat_samples(samples)
        count = len(segments.lengths)
        num_rows = round_up(max(count, 1), self._ranks)
        # Sample i goes to rank i mod ranks, and the rows of a rank lie together; rows beyond the samples stay empty.
        sample_of_row = np.arange(num_rows).reshape(-1, self._ranks).T.ravel()
        filled = sample_of_row < count
        return self._write(segments, sample_of_row[filled], _counted(filled))

    def _write(self, segments: FlatSegments, positions: Table, row_offsets: Table) -> TrainingBatch:
        """positions: which segment each filled row holds."""
        length = round_up(int(segments.lengths.max(initial=1)), self._multiple)
        starts = np.zeros(len(positions), np.int64)
        if self._config.pad_side == "left":
            starts = length - segments.lengths[positions]
        return self._writer.write(segments, Placement(positions, row_offsets, starts, length))


def _counted(filled: np.ndarray) -> Table:
    """Row offsets of rows that hold one segment or none."""
    offsets = np.zeros(len(filled) + 1, np.int64)
    np.cumsum(filled, out=offsets[1:])
    return offsets
