"""Write placed segments into reused buffers: what the fast collators share.

Place on the way: FlatSegments + Placement -> TrainingBatch. Which segment goes where is the collator's business; the
loops over tokens are the kernels'. A batch's columns are carved from one buffer that comes back when the batch is
released: warm memory is several times faster to write than fresh pages. There is no ring: a batch that nobody releases
keeps its own memory for as long as it lives, and is then freed like any other.

Nothing here copies to a device or knows of streams. Whoever copies a column without waiting, as core's local backend
does from pinned memory, must have waited for that copy before the batch is released: the next batch may be written into
the same memory at once, by another thread. Core's loops release a batch after the backend has returned the numbers of
its step, for which it waited for the device, and so for all copies before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, TOKEN_COLUMNS, LazyRagged, TrainingBatch
from spurline.data.collators.layout import layout_info
from spurline_collation_fast.flat_segments import FlatColumn, FlatSegments, SegmentNames
from spurline_collation_fast.kernels import Kernels, Table

Buffer = NDArray[np.uint8]

_ALIGNMENT = 64
"""Bytes at whose multiples columns begin: a cache line, and the widest vector store."""


class Lease:
    """Columns in memory of a pool, until released; `size` is their bytes. Releasing may come from any thread, and
    twice."""

    def __init__(self, pool: BufferPool, buffer: Buffer, arrays: dict[str, NDArray[Any]], size: int) -> None:
        self._pool = pool
        self._buffer: Buffer | None = buffer
        self.arrays = arrays
        self.size = size
        self.tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def release(self) -> None:
        """Give the memory back; nothing may read or write the columns after this, nor may a copy still be under way."""
        with self._pool.lock:
            buffer, self._buffer = self._buffer, None
            if buffer is not None:
                self._pool.put_back(buffer)


class BufferPool:
    """Buffers that are free now, at most `max_free`. In use are as many as there are unreleased batches."""

    def __init__(self, max_free: int = 4) -> None:
        self.lock = threading.Lock()
        self._max_free = max_free
        self._free: list[Buffer] = []

    def acquire(self, columns: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> Lease:
        """Columns of these shapes and dtypes; what is in them is undefined."""
        starts: list[int] = []
        size = 0
        for shape, dtype in columns.values():
            starts.append(size)
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        buffer = self._take(size)
        arrays = {
            name: np.ndarray(shape, dtype, buffer, start)
            for (name, (shape, dtype)), start in zip(columns.items(), starts, strict=True)
        }
        return Lease(self, buffer, arrays, size)

    def put_back(self, buffer: Buffer) -> None:
        """Serve Lease, which holds the lock."""
        if len(self._free) < self._max_free:
            self._free.append(buffer)

    def _take(self, size: int) -> Buffer:
        with self.lock:
            # The latest released first: it is the likeliest to be in a cache.
            for place in reversed(range(len(self._free))):
                if len(self._free[place]) >= size:
                    return self._free.pop(place)
            # All are too small: one of them makes way, so that a pool of outgrown buffers does not stay around.
            if self._free:
                self._free.pop(0)
        return _allocate(size + size // 8)


def _allocate(size: int) -> Buffer:
    """`size` bytes, aligned; pinned in a process that uses CUDA, so that copies to the device need not wait."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        buffer = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, pin_memory=True).numpy()
    else:
        # numpy asks the kernel for huge pages, torch does not.
        buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size]


_DTYPES = {
    name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in (TOKEN_COLUMNS | OPTIONAL_TOKEN_COLUMNS).items()
}
_ALWAYS = ("input_ids", "segment_ids", "position_ids")
"""Columns that any segments have, whatever values they come with."""


class Placement(NamedTuple):
    """positions: int64 [S], which segments, row by row. row_offsets: int64 [R + 1] into them. columns: int64 [S], the
    column at which each begins. length: tokens in a row."""

    positions: Table
    row_offsets: Table
    columns: Table
    length: int


def columns_of(segments: FlatSegments) -> dict[str, tuple[int, ...]]:
    """The columns beyond those of any segments, with the shape of what each has per token."""
    return {name: column.values.shape[1:] for name, column in segments.values.items()}


def _part(place: Placement, rows: slice) -> Placement:
    """Return the placement of these rows alone, its segments counted from 0; each row holds one segment, in order."""
    first = rows.start
    stop = None if rows.stop is None else rows.stop + 1
    offsets = place.row_offsets[first:stop]
    here = slice(first, offsets[-1])
    return Placement(place.positions[here] - first, offsets - first, place.columns[here], place.length)


def _batch(
    lease: Lease, place: Placement, lengths: Table, names: SegmentNames, num_tokens: int, info: Mapping[str, float]
) -> TrainingBatch:
    """The batch around columns that are filled. lengths, names: of all segments."""
    positions, row_offsets = place.positions, place.row_offsets
    num_rows = len(row_offsets) - 1
    return TrainingBatch(
        tokens=lease.tensors,
        segments={
            # A batch that nobody asks for these does not make them.
            "uid": LazyRagged(lambda: names.uids(positions), row_offsets),
            "sample": LazyRagged(lambda: names.samples[positions], row_offsets),
            "turn": LazyRagged(lambda: names.turns[positions], row_offsets),
            "length": LazyRagged(lambda: lengths[positions].astype(np.int32), row_offsets),
        },
        unit_ids=torch.from_numpy(np.arange(num_rows)),
        is_padding_row=torch.from_numpy(row_offsets[1:] == row_offsets[:-1]),
        info={**layout_info(num_tokens, num_rows, place.length), **info},
        on_release=lease.release,
    )


class RowWriter:
    """Owns the pool of one collator. Calls do not share state, so they may come from several threads."""

    def __init__(self, pad_token_id: int, kernels: Kernels) -> None:
        self._pad_token_id = pad_token_id
        self._kernels = kernels
        self._pool = BufferPool()

    def write(
        self, segments: FlatSegments, names: SegmentNames, place: Placement, info: Mapping[str, float] | None = None
    ) -> TrainingBatch:
        """The batch; its buffers come back at `release()`."""
        lease = self._acquire(place, columns_of(segments))
        num_tokens = self._write_columns(segments, place, lease.arrays)
        return _batch(lease, place, segments.lengths, names, num_tokens, info or {})

    def write_pieces(
        self,
        pieces: Iterable[FlatSegments],
        columns: Mapping[str, tuple[int, ...]],
        lengths: Table,
        names: SegmentNames,
        place: Placement,
    ) -> TrainingBatch:
        """Write a batch from segments that come piece after piece, holding only one piece at a time.

        columns: as of `columns_of`; every piece has these. lengths, names, place: of the segments of all pieces; rows
        hold them in order, one each, and those without a segment come last.
        """
        lease = self._acquire(place, columns)
        num_tokens = done = 0
        for segments in pieces:
            stop = done + len(segments.lengths)
            rows = slice(done, stop if stop < len(lengths) else None)
            arrays = {name: array[rows] for name, array in lease.arrays.items()}
            num_tokens += self._write_columns(segments, _part(place, rows), arrays)
            done = stop
        assert done == len(lengths), f"pieces of {done} segments, not {len(lengths)}"
        return _batch(lease, place, lengths, names, num_tokens, {})

    def _acquire(self, place: Placement, columns: Mapping[str, tuple[int, ...]]) -> Lease:
        shape = (len(place.row_offsets) - 1, place.length)
        return self._pool.acquire(
            {name: (shape, _DTYPES[name]) for name in _ALWAYS}
            | {name: (shape + trailing, _DTYPES[name]) for name, trailing in columns.items()}
        )

    def _write_columns(self, segments: FlatSegments, place: Placement, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Fill all columns; returns the number of tokens. Values that no column is there for are left out."""
        tables = (place.positions, place.columns, place.row_offsets)
        for name, column in segments.values.items():
            if name in arrays:
                self._write_values(column, segments.lengths, tables, arrays[name])
        return self._kernels.write_rows(
            segments.tokens,
            segments.begins,
            segments.lengths,
            *tables,
            self._pad_token_id,
            *(arrays[name] for name in _ALWAYS),
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
