"""Write placed segments into reused buffers: what the fast collators share.

Place on the way: FlatSegments + Placement -> TrainingBatch. Which segment goes where is the collator's business; the
loops over tokens are the kernels'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, TOKEN_COLUMNS, TrainingBatch
from spurline.data.layout import layout_info
from spurline.data.ragged import LazyRagged, Ragged
from spurline_collation_fast.buffers import BufferPool, Lease
from spurline_collation_fast.flat_segments import FlatColumn, FlatSegments, Table
from spurline_collation_fast.kernels import Kernels

_DTYPES = {
    name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in (TOKEN_COLUMNS | OPTIONAL_TOKEN_COLUMNS).items()
}


@dataclass(frozen=True)
class Placement:
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
        num_rows = len(place.row_offsets) - 1
        lengths = segments.lengths[place.positions]
        num_tokens = int(lengths.sum())
        lease = self._acquire(segments, num_rows, place.length)
        # Where most is padding, one fill of all is faster than many of the gaps.
        clear = 2 * num_tokens < num_rows * place.length
        self._write_columns(segments, place, lengths, clear, lease.arrays)
        filled = np.diff(place.row_offsets) > 0
        return TrainingBatch(
            tokens=lease.tensors,
            segments={
                # Names are for people; a batch that nobody asks for them does not make them.
                "uid": LazyRagged(lambda: segments.uids(place.positions), place.row_offsets),
                "sample": Ragged(segments.samples[place.positions], place.row_offsets),
                "turn": Ragged(segments.turns[place.positions], place.row_offsets),
                "length": Ragged(lengths.astype(np.int32), place.row_offsets),
            },
            unit_ids=torch.arange(num_rows, dtype=torch.int64),
            is_padding_row=torch.from_numpy(~filled),
            info={**layout_info(num_tokens, num_rows, place.length), **(info or {})},
            on_release=lease.release,
        )

    def _acquire(self, segments: FlatSegments, num_rows: int, length: int) -> Lease:
        trailing = {name: column.values.shape[1:] for name, column in segments.values.items()}
        return self._pool.acquire(
            {
                name: ((num_rows, length, *trailing.get(name, ())), dtype)
                for name, dtype in _DTYPES.items()
                if name in TOKEN_COLUMNS or name in segments.values
            }
        )

    def _write_columns(
        self,
        segments: FlatSegments,
        place: Placement,
        lengths: Table,
        clear: bool,
        arrays: Mapping[str, NDArray],
    ) -> None:
        rows, begins = place.row_offsets, segments.begins[place.positions]
        kernels, columns = self._kernels, place.columns
        # Read-only, so that numba sees one type for tokens in memory and for mapped ones, and compiles once.
        tokens = _read_only(segments.tokens)
        kernels.write_tokens(tokens, begins, lengths, columns, rows, self._pad_token_id, arrays["input_ids"])
        kernels.write_segment_ids(lengths, columns, rows, clear, arrays["segment_ids"])
        kernels.write_positions(lengths, columns, rows, clear, arrays["position_ids"])
        for name, column in segments.values.items():
            self._write_values(column, place, lengths, clear, arrays[name])

    def _write_values(self, column: FlatColumn, place: Placement, lengths: Table, clear: bool, out: NDArray) -> None:
        # A column with several values per token is one with longer rows.
        each = math.prod(column.values.shape[1:])
        scaled = (column.begins[place.positions], column.skips[place.positions], lengths, place.columns)
        if each != 1:
            scaled = tuple(table * each for table in scaled)
        self._kernels.write_values(
            _read_only(column.values.reshape(-1)),
            *scaled,
            place.row_offsets,
            clear,
            out.reshape(out.shape[0], -1),
        )


def _read_only(values: NDArray) -> NDArray:
    view = np.asarray(values).view()
    view.flags.writeable = False
    return view
