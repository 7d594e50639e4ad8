"""Write placed segments into reused buffers.

Place on the way: FlatSegments + Placement -> TrainingBatch. Collators decide which segment goes where; the kernels loop
over tokens. The columns of a batch are carved from one buffer, which comes back when the batch is released: warm memory
is several times faster to write than fresh pages. A batch that nobody releases keeps its memory and is freed like any
other object.

Nothing here copies to a device. Code that copies a column without waiting, as the local backend does from pinned
memory, must have waited for that copy before the batch is released: the next batch may be written into the same memory
at once, by another thread. The loop releases a batch after the backend has returned the numbers of its step, which
waits for all copies before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, TOKEN_COLUMNS, LazyRagged, TrainingBatch
from spurline.data.collators.layout import layout_info
from spurline_collation_fast.flat_segments import FlatColumn, FlatSegments, SegmentNames, Table
from spurline_collation_fast.kernels.compiled import write_rows, write_values

Buffer = NDArray[np.uint8]

_ALIGNMENT = 64
"""Columns begin at multiples of this many bytes: a cache line, and the widest vector store."""


class Lease:
    """Columns in memory that a pool lends until they are released. Any thread may release them, also twice."""

    def __init__(self, pool: BufferPool, buffer: Buffer, arrays: dict[str, NDArray[Any]]) -> None:
        self._pool = pool
        self._buffer: Buffer | None = buffer
        self.arrays = arrays
        self.tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def release(self) -> None:
        """Give the memory back. No read, write or copy of the columns may be under way or come later."""
        with self._pool.lock:
            buffer, self._buffer = self._buffer, None
            if buffer is not None:
                self._pool.put_back(buffer)


class BufferPool:
    """Keeps at most `max_free` free buffers. Unreleased batches hold as many more as there are."""

    def __init__(self, max_free: int = 4) -> None:
        self.lock = threading.Lock()
        self._max_free = max_free
        self._free: list[Buffer] = []

    def acquire(self, columns: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> Lease:
        """Lend columns of these shapes and dtypes, whose content is undefined."""
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
        return Lease(self, buffer, arrays)

    def put_back(self, buffer: Buffer) -> None:
        """Take back the buffer of a Lease, which holds the lock."""
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
    """Return aligned memory; pinned in a process that uses CUDA, so that copies to the device need not wait."""
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
"""Columns that every batch has."""


class Placement(NamedTuple):
    """The places of S segments in R rows.

    Attributes:
        positions: Which segments, row by row [S].
        row_offsets: Where each row begins in `positions` [R + 1].
        columns: The column at which each segment begins [S].
        length: Tokens in a row.
    """

    positions: Table
    row_offsets: Table
    columns: Table
    length: int


class RowWriter:
    """Owns the buffers of one collator. Several threads may call it at once."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id
        self._pool = BufferPool()

    def write(
        self, segments: FlatSegments, names: SegmentNames, place: Placement, info: Mapping[str, float] | None = None
    ) -> TrainingBatch:
        """Return the batch; its buffer comes back at `release()`."""
        positions, row_offsets, num_rows = place.positions, place.row_offsets, len(place.row_offsets) - 1
        trailing: dict[str, tuple[int, ...]] = dict.fromkeys(_ALWAYS, ())
        trailing |= {name: column.values.shape[1:] for name, column in segments.values.items()}
        lease = self._pool.acquire(
            {name: ((num_rows, place.length, *each), _DTYPES[name]) for name, each in trailing.items()}
        )
        for name, column in segments.values.items():
            _write_column(column, segments.lengths, place, lease.arrays[name])
        num_tokens = write_rows(
            segments.tokens,
            segments.begins,
            segments.lengths,
            positions,
            place.columns,
            row_offsets,
            self._pad_token_id,
            *(lease.arrays[name] for name in _ALWAYS),
        )
        lengths = segments.lengths
        return TrainingBatch(
            tokens=lease.tensors,
            # Made when they are asked for.
            segments={
                "uid": LazyRagged(lambda: names.uids(positions), row_offsets),
                "sample": LazyRagged(lambda: names.samples[positions], row_offsets),
                "turn": LazyRagged(lambda: names.turns[positions], row_offsets),
                "length": LazyRagged(lambda: lengths[positions].astype(np.int32), row_offsets),
            },
            unit_ids=torch.from_numpy(np.arange(num_rows)),
            is_padding_row=torch.from_numpy(row_offsets[1:] == row_offsets[:-1]),
            info={**layout_info(num_tokens, num_rows, place.length), **(info or {})},
            on_release=lease.release,
        )


def _write_column(column: FlatColumn, lengths: Table, place: Placement, out: NDArray[Any]) -> None:
    values, begins, skips = column
    columns = place.columns
    if values.ndim > 1:
        # A column with several values per token is one with longer rows.
        each = math.prod(values.shape[1:])
        values, out = values.reshape(-1), out.reshape(out.shape[0], -1)
        begins, skips, lengths, columns = (table * each for table in (begins, skips, lengths, columns))
    write_values(values, begins, skips, lengths, place.positions, columns, place.row_offsets, out)
