"""Weight sync `shared_memory`: through memory without a name, to engines on the machine where the weights are.

Place on the way: weights -> copied into the memory as they come -> `MemoryReader` in each engine's process -> its
model. The memory is a file in no folder: readers open it through its owner's entry in /proc, and it is gone when the
last process that has it ends, also by a kill. It is reused for every bucket, and grows with the largest.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

import xxhash
from torch import Tensor

from spurline.errors import RunFailedError
from spurline_async_rl.weights.buckets import MakerSync, aligned, end_of, view
from spurline_models.machine import this_machine
from spurline_models.weight_buckets import TensorPlace, WeightBucket

_PATH, _FILE, _SIZE, _CHECKSUM = "path", "file", "bytes", "xxh3"
"""Keys of a bucket's `where`."""
_STEP = 1 << 20
"""Bytes by which the memory grows."""


class SharedMemorySync(MakerSync):
    """A `WeightSync`."""

    transport = "shared_memory"
    maker = f"{__name__}:MemoryMaker"

    def maker_settings(self) -> dict[str, Any]:
        return {"size": self.max_bucket_bytes, "checksum": self._config.checksum}


class MemoryMaker:
    """A `BucketMaker`. size: bytes to begin with; only used ones are taken. checksum: whether readers compare one."""

    def __init__(self, size: int, checksum: bool) -> None:
        self._checksum = checksum
        self._size = max(size, 1)
        self._memory: mmap.mmap | None = None
        self._file = -1

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        places: list[TensorPlace] = []
        end = 0
        for name, tensor in weights:
            place = TensorPlace.of(name, tensor, aligned(end))
            view(memoryview(self._room_for(place)), place).copy_(tensor)
            places.append(place)
            end = end_of([place])
        where = {
            _PATH: f"/proc/{os.getpid()}/fd/{self._file}",
            _FILE: os.fstat(self._file).st_ino,
            _SIZE: self._size,
        }
        if self._checksum:
            assert self._memory is not None
            where[_CHECKSUM] = checksum(memoryview(self._memory), places)
        return WeightBucket(SharedMemorySync.transport, tuple(places), where, machine=this_machine())

    def taken(self) -> None:
        """Do nothing: the next bucket is written over this one."""

    def close(self) -> None:
        """Free the memory. Engines that have mapped it keep it until they end or map another."""
        file, self._file, self._memory = self._file, -1, None
        if file >= 0:
            os.close(file)

    def _room_for(self, place: TensorPlace) -> mmap.mmap:
        """Return memory up to the end of this place. Raises RunFailedError if the machine has no more."""
        end = end_of([place])
        if self._file < 0:
            self._file = os.memfd_create(f"spurline-weights-{os.getpid()}")
        if self._memory is None or end > self._size:
            self._size = max(self._size, -(-end // _STEP) * _STEP)
            os.ftruncate(self._file, self._size)
            # What was written stays; the old mapping goes with its last view.
            self._memory = mmap.mmap(self._file, self._size)
        try:
            # Pages come only now. Without asking for them, a limit would kill this process with SIGBUS.
            os.posix_fallocate(self._file, place.offset, max(end - place.offset, 1))
        except OSError as error:
            raise RunFailedError(
                f"The bucket with weight {place.name} does not fit into shared memory, {end >> 20} MiB: "
                f"{error.strerror}. Lower source.weight_sync.bucket_mb, or set weight_sync: disk."
            ) from error
        return self._memory


class MemoryReader:
    """A reader of buckets in another process; it owns nothing."""

    def __init__(self) -> None:
        self._file = -1
        self._memory: mmap.mmap | None = None

    def read(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """Return the weights, as views of the memory, to be used before the bucket is answered.

        Raises RunFailedError if the memory cannot be reached, or its checksum is another one.
        """
        memory = memoryview(self._attach(bucket))
        expected = bucket.where.get(_CHECKSUM)
        if expected is not None:
            got = checksum(memory, bucket.places)
            if got != expected:
                raise RunFailedError(
                    f"A bucket of weights, {bucket.places[0].name} to {bucket.places[-1].name}, was written with "
                    f"checksum {expected} and read with {got}: the memory changed on the way."
                )
        return [(place.name, view(memory, place)) for place in bucket.places]

    def _attach(self, bucket: WeightBucket) -> mmap.mmap:
        file, size = bucket.where[_FILE], bucket.where[_SIZE]
        if self._memory is not None and self._file == file and len(self._memory) >= size:
            return self._memory
        path = bucket.where[_PATH]
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise _unreachable(path, error.strerror) from error
        try:
            # Another process may have got the number of one that has ended.
            if os.fstat(descriptor).st_ino != file:
                raise _unreachable(path, "it is another file now")
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._file = file
        return self._memory


def checksum(memory: memoryview, places: Sequence[TensorPlace]) -> str:
    """Return the checksum of the tensors' bytes, without those between them."""
    digest = xxhash.xxh3_64()
    for place in places:
        digest.update(memory[place.offset : end_of([place])])
    return digest.hexdigest()


def _unreachable(path: str, why: str | None) -> RunFailedError:
    return RunFailedError(
        f"The shared memory with the weights, {path}, cannot be opened by this engine: {why}. Trainer and engine must "
        "run on one machine, in one container and as one user; elsewhere set source.weight_sync: disk."
    )
