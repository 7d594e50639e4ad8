"""Write placed segments into reused buffers.

Data flow: FlatSegments + Placement -> TrainingBatch. Collators decide the place of each segment, and the kernels
loop over tokens. All columns of a batch are parts of one buffer, which is reused after the batch is released, because
warm memory is several times faster to write than fresh pages. If nobody releases a batch, its memory is freed like the
memory of any other object.

This module copies nothing to a device. Code that starts such a copy from a column, as the local backend does from
pinned memory, must wait for the copy before the batch is released, because another thread may then write the next batch
into the same memory. The training loop releases a batch after the backend has returned the metrics of its step. By then
all copies are complete.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, TOKEN_COLUMNS, TrainingBatch
from spurline.data.collators.layout import layout_info
from spurline_collation_fast.kernels.compiled import write_rows, write_values
from spurline_collation_fast.lazy_ragged import LazyRagged

Table = NDArray[np.int64]
Buffer = NDArray[np.uint8]

_ALIGNMENT = 64
"""Columns begin at multiples of this many bytes: the size of a cache line, and of the widest vector store."""


class FlatColumn(NamedTuple):
    """Values of one token column [V, ...].

    Segment i begins with `skips[i]` zeros. The rest of the segment is filled with values from `values[begins[i]]` on.
    """

    values: NDArray[Any]
    begins: Table
    skips: Table


class FlatSegments(NamedTuple):
    """Flat arrays that describe n segments before they are placed in rows. The kernels only read them.

    Attributes:
        tokens: int32 [T]; segment i begins with the tokens from `tokens[begins[i]]` on.
        begins: int64 [n].
        lengths: int64 [n].
        rest: The tokens of each segment after its first `rest.skips[i]` tokens, which are those in `tokens`.
        values: `loss_weights` and optional columns, by name.
        uids: Returns the uids of the segments at given positions. A batch keeps this function, so the function must not
            keep the tokens of rollouts alive.
        samples: int32 [n], number of the sample of each segment.
        turns: int32 [n], number of the turn of each segment.
    """

    tokens: NDArray[np.int32]
    begins: Table
    lengths: Table
    rest: FlatColumn
    values: Mapping[str, FlatColumn]
    uids: Callable[[Table], NDArray[Any]]
    samples: NDArray[np.int32]
    turns: NDArray[np.int32]


class Placement(NamedTuple):
    """The places of S segments in R rows.

    Attributes:
        positions: Positions of the segments in `FlatSegments`, row by row [S].
        row_offsets: Where each row begins in `positions` [R + 1].
        columns: The column at which each segment begins [S].
        length: Tokens in a row.
    """

    positions: Table
    row_offsets: Table
    columns: Table
    length: int


class Lease:
    """Columns in a pool's memory, in use until they are released, by any thread. A second release has no effect."""

    def __init__(self, pool: BufferPool, buffer: Buffer, arrays: dict[str, NDArray[Any]]) -> None:
        self._pool = pool
        self._buffer: Buffer | None = buffer
        self.arrays = arrays
        self.tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def release(self) -> None:
        """Return the memory to the pool. The caller ensures that no code uses or copies the columns from now on."""
        pool = self._pool
        with pool.lock:
            buffer, self._buffer = self._buffer, None
            if buffer is not None and len(pool.free) < pool.max_free:
                pool.free.append(buffer)


class BufferPool:
    """Keeps at most `max_free` free buffers. There may be any number of unreleased batches."""

    def __init__(self, max_free: int = 4) -> None:
        self.lock = threading.Lock()
        self.max_free = max_free
        self.free: list[Buffer] = []

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

    def _take(self, size: int) -> Buffer:
        with self.lock:
            # The buffer that was released last is the most likely to be in the processor's cache.
            for place in reversed(range(len(self.free))):
                if len(self.free[place]) >= size:
                    return self.free.pop(place)
            # All free buffers are too small. Drop the oldest, so that small buffers do not fill the pool forever.
            if self.free:
                self.free.pop(0)
        return _allocate(size + size // 8)


def _allocate(size: int) -> Buffer:
    """Return aligned memory. It is pinned in a process that uses CUDA, so that copies to the device need not wait."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        buffer = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, pin_memory=True).numpy()
    else:
        # numpy asks the kernel for huge pages, but torch does not.
        buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size]


_DTYPES = {
    name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in (TOKEN_COLUMNS | OPTIONAL_TOKEN_COLUMNS).items()
}
_ALWAYS = ("input_ids", "segment_ids", "position_ids")
"""Columns that every batch has."""


class RowWriter:
    """Owns the buffers of one collator. Several threads may call it at once."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id
        self._pool = BufferPool()

    def write(self, segments: FlatSegments, place: Placement, info: Mapping[str, float] | None = None) -> TrainingBatch:
        """Return the batch. Its `release()` returns the buffer to the pool."""
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
            *segments.rest,
            segments.lengths,
            positions,
            place.columns,
            row_offsets,
            self._pad_token_id,
            *(lease.arrays[name] for name in _ALWAYS),
        )
        # The batch computes these columns when they are read. Its functions must not keep `segments.tokens` alive.
        uids, samples, turns, lengths = segments.uids, segments.samples, segments.turns, segments.lengths
        return TrainingBatch(
            tokens=lease.tensors,
            segments={
                "uid": LazyRagged(lambda: uids(positions), row_offsets),
                "sample": LazyRagged(lambda: samples[positions], row_offsets),
                "turn": LazyRagged(lambda: turns[positions], row_offsets),
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
        # Treat a column with several values per token as a flat column with longer segments.
        each = math.prod(values.shape[1:])
        values, out = values.reshape(-1), out.reshape(out.shape[0], -1)
        begins, skips, lengths, columns = (table * each for table in (begins, skips, lengths, columns))
    write_values(values, begins, skips, lengths, place.positions, columns, place.row_offsets, out)
