"""Write placed segments into reused buffers: what the fast collators share.

Place on the way: FlatSegments + Placement -> TrainingBatch. Which segment goes where is the collator's business; the
loops over tokens are the kernels'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, TOKEN_COLUMNS, TrainingBatch
from spurline.data.layout import layout_info
from spurline.data.ragged import LazyRagged
from spurline_collation_fast.buffers import BufferPool, Lease
from spurline_collation_fast.flat_segments import FlatColumn, FlatSegments
from spurline_collation_fast.kernels import Kernels, Table

_DTYPES = {
    name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in (TOKEN_COLUMNS | OPTIONAL_TOKEN_COLUMNS).items()
}
_ALWAYS = ("input_ids", "segment_ids", "position_ids")
"""Columns that any segments have, whatever values they come with."""

PAST_CACHES_FROM_BYTES = 8 << 20
"""Bytes of a batch from which on it is written past the caches: about a core's share of the last level."""


class Placement(NamedTuple):
    """positions: int64 [S], which segments, row by row. row_offsets: int64 [R + 1] into them. columns: int64 [S], the
    column at which each begins. length: tokens in a row."""

    positions: Table
    row_offsets: Table
    columns: Table
    length: int


class RowWriter:
    """Owns the pool of one collator. Calls do not share state, so they may come from several threads."""

    def __init__(self, pad_token_id: int, kernels: Kernels) -> None:
        self._pad_token_id = pad_token_id
        self._kernels = kernels
        self._pool = BufferPool()

    def write(self, segments: FlatSegments, place: Placement, info: Mapping[str, float] | None = None) -> TrainingBatch:
        """The batch; its buffers come back at `release()`."""
        positions, row_offsets = place.positions, place.row_offsets
        num_rows = len(row_offsets) - 1
        lease = self._acquire(segments, num_rows, place.length)
        num_tokens = self._write_columns(segments, place, lease)
        return TrainingBatch(
            tokens=lease.tensors,
            segments={
                # A batch that nobody asks for these does not make them.
                "uid": LazyRagged(lambda: segments.uids(positions), row_offsets),
                "sample": LazyRagged(lambda: segments.samples[positions], row_offsets),
                "turn": LazyRagged(lambda: segments.turns[positions], row_offsets),
                "length": LazyRagged(lambda: segments.lengths[positions].astype(np.int32), row_offsets),
            },
            unit_ids=torch.from_numpy(np.arange(num_rows)),
            is_padding_row=torch.from_numpy(row_offsets[1:] == row_offsets[:-1]),
            info={**layout_info(num_tokens, num_rows, place.length), **(info or {})},
            on_release=lease.release,
        )

    def _acquire(self, segments: FlatSegments, num_rows: int, length: int) -> Lease:
        shape = (num_rows, length)
        return self._pool.acquire(
            {name: (shape, _DTYPES[name]) for name in _ALWAYS}
            | {name: (shape + column.values.shape[1:], _DTYPES[name]) for name, column in segments.values.items()}
        )

    def _write_columns(self, segments: FlatSegments, place: Placement, lease: Lease) -> int:
        """Fill all columns; returns the number of tokens."""
        arrays, rows = lease.arrays, (place.positions, place.columns, place.row_offsets)
        for name, column in segments.values.items():
            self._write_values(column, segments.lengths, rows, arrays[name])
        return self._kernels.write_rows(
            segments.tokens,
            segments.begins,
            segments.lengths,
            *rows,
            self._pad_token_id,
            lease.size > PAST_CACHES_FROM_BYTES,
            arrays["input_ids"],
            arrays["segment_ids"],
            arrays["position_ids"],
        )

    def _write_values(
        self, column: FlatColumn, lengths: Table, rows: tuple[Table, Table, Table], out: NDArray[Any]
    ) -> None:
        begins, skips = column.begins, column.skips
        positions, columns, row_offsets = rows
        values = column.values
        if values.ndim > 1:
            # A column with several values per token is one with longer rows.
            each = math.prod(values.shape[1:])
            values, out = values.reshape(-1), out.reshape(out.shape[0], -1)
            begins, skips, lengths, columns = (table * each for table in (begins, skips, lengths, columns))
        self._kernels.write_values(values, begins, skips, lengths, positions, columns, row_offsets, out)
