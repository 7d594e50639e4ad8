"""Weight sync `shared_memory`: through one POSIX segment, to engines on this machine.

Place on the way: weights -> copied into the segment as they come -> `SegmentReader` in each engine's process -> its
model. The segment is reused for every bucket and publish, and made anew where a tensor is larger. Who creates it
unlinks it; the standard library's resource tracker does so when the process is killed. Readers only attach.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from multiprocessing.shared_memory import SharedMemory

import xxhash
from torch import Tensor

from spurline.errors import RunFailedError
from spurline.protocols.rollout_engine import TensorPlace, WeightBucket
from spurline_async_rl.weights.buckets import BucketSync, aligned, end_of, place_of, view

_SEGMENT, _CHECKSUM = "segment", "xxh3"
"""Keys of a bucket's `where`."""
_FOLDER = "/dev/shm"
"""Where segments can be opened by name."""


class SharedMemorySync(BucketSync):
    """A `WeightSync`."""

    transport = "shared_memory"
    _segment: SharedMemory | None = None

    def make_buckets(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Iterator[WeightBucket]:
        places: list[TensorPlace] = []
        for name, tensor in weights:
            if places and aligned(end_of(places)) + tensor.nbytes > self.max_bucket_bytes:
                yield self._bucket(places)
                places = []
            place = place_of(name, tensor, aligned(end_of(places)))
            memory = self._room_for(place)
            view(memory, place).copy_(tensor)
            places.append(place)
        if places:
            yield self._bucket(places)

    def close(self) -> None:
        """Free the memory. Engines that still hold the segment keep it until they end."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.unlink()
            segment.close()

    def _bucket(self, places: Sequence[TensorPlace]) -> WeightBucket:
        assert self._segment is not None
        where = {_SEGMENT: self._segment.name}
        if self._config.checksum:
            where[_CHECKSUM] = checksum(_memory(self._segment), places)
        return WeightBucket(self.transport, tuple(places), where, within_machine=True)

    def _room_for(self, place: TensorPlace) -> memoryview:
        """Memory that reaches to the end of this place. Raises RunFailedError when the machine has no more."""
        end = end_of([place])
        if self._segment is None or self._segment.size < end:
            self.close()
            # SharedMemory tells the resource tracker, a process of its own, which outlives a kill of this one.
            name = f"spurline-{os.getpid()}-{secrets.token_hex(4)}"
            self._segment = SharedMemory(name, create=True, size=max(self.max_bucket_bytes, end))
        descriptor = _open(self._segment.name)
        try:
            # Pages come only now. Without asking for them, a full /dev/shm would kill this process with SIGBUS.
            os.posix_fallocate(descriptor, place.offset, max(end - place.offset, 1))
        except OSError as error:
            free = os.statvfs(_FOLDER)
            raise RunFailedError(
                f"There is no shared memory for weight {place.name}: {error.strerror}; {_FOLDER} has "
                f"{free.f_bavail * free.f_frsize >> 20} MiB left. Make it larger (docker run --shm-size), or lower "
                "source.weight_sync.bucket_mb."
            ) from error
        finally:
            os.close(descriptor)
        return _memory(self._segment)


class SegmentReader:
    """Reads buckets in another process, which may end whenever it likes: it owns nothing."""

    def __init__(self) -> None:
        self._name = ""
        self._memory: mmap.mmap | None = None

    def read(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """The weights, as views of the segment: use them before the bucket is answered.

        Raises RunFailedError when its checksum is another one.
        """
        memory = memoryview(self._attach(bucket.where[_SEGMENT]))
        expected = bucket.where.get(_CHECKSUM)
        if expected is not None:
            got = checksum(memory, bucket.places)
            if got != expected:
                raise RunFailedError(
                    f"A bucket of weights, {bucket.places[0].name} to {bucket.places[-1].name}, was written with "
                    f"checksum {expected} and read with {got}: the memory changed on the way."
                )
        return [(place.name, view(memory, place)) for place in bucket.places]

    def _attach(self, name: str) -> mmap.mmap:
        if self._memory is None or self._name != name:
            # Not `SharedMemory(name)`: before Python 3.13 it tells this process's resource tracker, which would unlink
            # the segment when this process ends. The old mapping goes with its last view.
            descriptor = _open(name)
            try:
                self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
            self._name = name
        return self._memory


def checksum(memory: memoryview, places: Sequence[TensorPlace]) -> str:
    """The checksum of the tensors' bytes; what lies between them may be anything."""
    digest = xxhash.xxh3_64()
    for place in places:
        digest.update(memory[place.offset : end_of([place])])
    return digest.hexdigest()


def _memory(segment: SharedMemory) -> memoryview:
    assert segment.buf is not None
    return segment.buf


def _open(name: str) -> int:
    return os.open(f"{_FOLDER}/{name}", os.O_RDWR)
