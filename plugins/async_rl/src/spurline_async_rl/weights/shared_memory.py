"""Weight sync `shared_memory`: send weights through shared memory to engines on the trainer's machine.

The memory is a file that is in no folder (`memfd_create`). Readers open it through its owner's entry in /proc. The
system frees it when the last process that uses it ends or is killed. All buckets use the same memory.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from spurline.errors import RunFailedError
from spurline_async_rl.weights.buckets import BucketSync, end_of, fill, places_of, unpack
from spurline_models.machine import this_machine
from spurline_models.weight_buckets import WeightBucket

_PATH, _FILE, _SIZE = "path", "file", "bytes"
"""Keys of a bucket's `where`."""


class SharedMemorySync(BucketSync):
    """A `WeightSync` through shared memory."""

    transport = "shared_memory"
    maker = f"{__name__}:MemoryMaker"

    def maker_settings(self) -> dict[str, Any]:
        return {"size": self.max_bucket_bytes}


class MemoryMaker:
    """A `BucketMaker`. `size` is the initial size of its file, which may grow. Unused pages of the file take no RAM."""

    def __init__(self, size: int) -> None:
        self._size = max(size, 1)
        self._memory: Tensor | None = None
        self._file = -1

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        held = list(weights)
        places = places_of(held)
        fill(self._room_for(end_of(places)), places, held)
        where = {_PATH: f"/proc/{os.getpid()}/fd/{self._file}", _FILE: os.fstat(self._file).st_ino, _SIZE: self._size}
        return WeightBucket(SharedMemorySync.transport, places, where, machine=this_machine())

    def taken(self) -> None:
        """Do nothing, because the next bucket overwrites this one."""

    def close(self) -> None:
        """Free the memory. Engines that have mapped it keep it until they end or map new memory."""
        file, self._file, self._memory = self._file, -1, None
        if file >= 0:
            os.close(file)

    def _room_for(self, size: int) -> Tensor:
        """Return memory of at least this size. Raises RunFailedError if the machine has too little."""
        if self._file < 0:
            self._file = os.memfd_create(f"spurline-weights-{os.getpid()}")
        if self._memory is None or size > self._size:
            self._size = max(self._size, size)
            os.ftruncate(self._file, self._size)
            self._memory = _mapped(self._file, self._size)
        try:
            # Reserve the pages. Otherwise this process would be killed with SIGBUS if there is too little memory.
            os.posix_fallocate(self._file, 0, max(size, 1))
        except OSError as error:
            raise RunFailedError(
                f"A bucket of weights of {size >> 20} MiB does not fit into shared memory: {error.strerror}. "
                "Lower source.weight_sync.bucket_mb, or set weight_sync: disk."
            ) from error
        return self._memory


class MemoryReader:
    """A reader of buckets in another process."""

    def __init__(self) -> None:
        self._file = -1
        self._memory: Tensor | None = None

    def read(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """Return the weights, as views of the memory. The trainer overwrites it when the engine has loaded the bucket.

        Raises:
            RunFailedError: If the memory cannot be reached.
        """
        path, file, size = (bucket.where[key] for key in (_PATH, _FILE, _SIZE))
        if self._memory is None or self._file != file or len(self._memory) < size:
            self._memory, self._file = self._mapping(path, file, size), file
        return unpack(self._memory, bucket.places)

    @staticmethod
    def _mapping(path: str, file: int, size: int) -> Tensor:
        try:
            with open(path, "r+b", buffering=0) as opened:
                # The owner may have ended, and another process may have its id now.
                if os.fstat(opened.fileno()).st_ino != file:
                    raise OSError(errno.ESTALE, "it is another file now")
                return _mapped(opened.fileno(), size)
        except OSError as error:
            raise RunFailedError(
                f"This engine cannot open the shared memory with the weights, {path}: {error.strerror}. Trainer and "
                "engine must run on one machine, in one container and as one user. Otherwise set source.weight_sync: "
                "disk."
            ) from error


def _mapped(file: int, size: int) -> Tensor:
    """Return the memory of the file, uint8 [size]. It is unmapped when its last view is freed."""
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
