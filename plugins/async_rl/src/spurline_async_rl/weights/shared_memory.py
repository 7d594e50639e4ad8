"""Weight sync `shared_memory`: through memory without a name, to engines on the machine where the weights are.

Place on the way: weights -> copied into the memory as they come -> `MemoryReader` in each engine's process -> its
model. The memory is a file that is in no folder: readers open it through its owner's entry in /proc, and it is gone
when the last process that has it ends, however it ends. It is reused for every bucket and publish, and grows with the
largest.
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
    """A `BucketMaker`.

    size: bytes to begin with, of which only those are taken that are used. checksum: whether readers are told that of
    the weights.
    """

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
        """The next bucket is written over this one."""

    def close(self) -> None:
        """Free the memory. Engines that have mapped it keep it until they end or map another."""
        file, self._file, self._memory = self._file, -1, None
        if file >= 0:
            os.close(file)

    def _room_for(self, place: TensorPlace) -> mmap.mmap:
        """Memory that reaches to the end of this place. Raises RunFailedError when the machine has no more."""
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
                f"There is no shared memory for weight {place.name}, whose bucket takes {end >> 20} MiB: "
                f"{error.strerror}. Lower source.weight_sync.bucket_mb, or set weight_sync: disk."
            ) from error
        return self._memory


class MemoryReader:
    """Reads buckets in another process, which may end whenever it likes: it owns nothing."""

    def __init__(self) -> None:
        self._file = -1
        self._memory: mmap.mmap | None = None

    def read(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """The weights, as views of the memory: use them before the bucket is answered.

        Raises RunFailedError when it cannot be reached, or its checksum is another one.
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
    """The checksum of the tensors' bytes; what lies between them may be anything."""
    digest = xxhash.xxh3_64()
    for place in places:
        digest.update(memory[place.offset : end_of([place])])
    return digest.hexdigest()


def _unreachable(path: str, why: str | None) -> RunFailedError:
    return RunFailedError(
        f"The shared memory with the weights, {path}, cannot be opened by this engine: {why}. Trainer and engine must "
        "run on one machine, in one container and as one user; elsewhere set source.weight_sync: disk."
    )
