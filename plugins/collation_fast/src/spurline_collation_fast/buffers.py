"""Memory of batches, reused: a batch's columns are carved from one buffer that comes back when the batch is released.

Place on the way: a collator acquires, fills and hands out; the loop releases at the end of the step. Warm memory is
several times faster to write than fresh pages. No ring: a buffer is given out again only after its release, so a batch
that nobody releases keeps its own memory for as long as it lives, and is then freed like any other.

Nothing here copies to a device or knows of streams. Whoever copies a column without waiting, as core's local backend
does from pinned memory, must have waited for that copy before the batch is released: the next batch may be written into
the same memory at once, by another thread. Core's loops release a batch after the backend has returned the numbers of
its step, for which it waited for the device, and so for all copies before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
        """For Lease, which holds the lock."""
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
