"""Publish weights bucket by bucket: what all transports share, and the one that has nothing else to do.

Place on the way: `backend.named_weights()`, on a thread -> buckets, one at a time -> every engine at once. How a bucket
travels is the transports' business; what an engine does with it is the engine's.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spurline.errors import ConfigError, RunFailedError
from spurline.protocols.rollout_engine import TakesWeights, TensorPlace, WeightBucket
from spurline.protocols.weight_sync import SyncReport
from spurline.rl.concurrency import in_thread
from spurline_async_rl.engines.commands import BeginUpdate, Command, FinishUpdate, LoadBucket
from spurline_async_rl.engines.vllm.launch import require_vllm
from spurline_async_rl.weights.configs import BucketSyncConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig
    from spurline.protocols.backend import Backend


_ALIGNMENT = 64
"""Bytes; more than any type needs."""


class BucketSync(ABC):
    """A `WeightSync` that makes buckets. Subclass with `transport` and `make_buckets`."""

    transport: str

    def __init__(self, config: BucketSyncConfig, run: RunConfig | None = None) -> None:
        """run: the whole config, for transports that write into the run directory.

        Raises ConfigError on a machine where this transport cannot work.
        """
        if config.needs_gpu:
            _require_gpu(self.transport)
        self._config = config
        self.timeout_s = config.timeout_s
        self.max_bucket_bytes = config.bucket_mb << 20
        self.waits_for = ""

    @abstractmethod
    def make_buckets(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Iterator[WeightBucket]:
        """Runs on a thread; asked for the next bucket when every engine has taken the last one."""

    def close(self) -> None:  # noqa: B027
        """Free what the transport holds; most hold nothing."""

    async def publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights]) -> SyncReport:
        limit_s = self._config.timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._publish(version, backend, engines)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RunFailedError(
                f"Publishing version {version} over {self.transport} did not end within {limit_s:g} s; it waited for "
                f"{self.waits_for}. Raise source.weight_sync.timeout_s when it is only slow."
            ) from error

    async def _publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights]) -> SyncReport:
        began = time.perf_counter()
        await self._tell(engines, "to begin an update", BeginUpdate(version))
        sending = time.perf_counter()
        sent = number = 0
        buckets = self.make_buckets(version, _weights_of(backend))
        self.waits_for = "the backend's first weights"
        while (bucket := await in_thread(_next, buckets)) is not None:
            number += 1
            sent += bucket_bytes(bucket.places)
            await self._tell(engines, f"to load bucket {number}", LoadBucket(bucket))
            # The next one may need the memory.
            del bucket
            self.waits_for = f"the backend's weights after bucket {number}"
        finishing = time.perf_counter()
        await self._tell(engines, "to finish the update", FinishUpdate(version))
        return SyncReport(version, sent, finishing - sending, time.perf_counter() - began)

    async def _tell(self, engines: Sequence[TakesWeights], what: str, command: Command) -> None:
        """Tell every engine at once. Raises the first error when all have answered."""
        self.waits_for = f"{len(engines)} engine(s) {what}"
        answers = await asyncio.gather(*map(command.apply, engines), return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer


class InProcessSync(BucketSync):
    """A `WeightSync` that hands the tensors themselves to an engine in this process, which copies them.

    Both sides see the same memory, so there is nothing that a checksum could find.
    """

    transport = "in_process"

    def make_buckets(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Iterator[WeightBucket]:
        for held in cut(weights, self.max_bucket_bytes):
            places = tuple(place_of(name, tensor) for name, tensor in held)
            yield WeightBucket(self.transport, places, tensors=tuple(tensor for _, tensor in held))


def _require_gpu(transport: str) -> None:
    if not torch.cuda.is_available():
        raise ConfigError.at(
            "source.weight_sync.name",
            f"is {transport}, which sends from GPU to GPU, but torch sees no GPU. Set weight_sync: "
            "shared_memory, or check nvidia-smi.",
        )
    require_vllm()


def cut(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights in order, in lists of at most so many bytes; a larger tensor alone."""
    held: list[tuple[str, Tensor]] = []
    used = 0
    for name, tensor in weights:
        if held and used + tensor.nbytes > max_bytes:
            yield held
            held, used = [], 0
        held.append((name, tensor))
        used += tensor.nbytes
    if held:
        yield held


def place_of(name: str, tensor: Tensor, offset: int = 0) -> TensorPlace:
    return TensorPlace(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


def view(memory: memoryview, place: TensorPlace) -> Tensor:
    """The tensor at its place in the bucket's memory."""
    count = math.prod(place.shape)
    dtype: torch.dtype = getattr(torch, place.dtype)
    if count == 0:
        return torch.empty(place.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place.offset).reshape(place.shape)


def end_of(places: Sequence[TensorPlace]) -> int:
    """Bytes that they reach to."""
    return max((place.offset + _nbytes(place) for place in places), default=0)


def bucket_bytes(places: Sequence[TensorPlace]) -> int:
    """Bytes of the tensors themselves."""
    return sum(map(_nbytes, places))


def _nbytes(place: TensorPlace) -> int:
    return math.prod(place.shape) * getattr(torch, place.dtype).itemsize


def aligned(size: int) -> int:
    """The next offset at which any tensor may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _weights_of(backend: Backend) -> Iterator[tuple[str, Tensor]]:
    """The backend is called where the first weight is asked for: on the thread."""
    yield from backend.named_weights()


def _next(buckets: Iterator[WeightBucket]) -> WeightBucket | None:
    return next(buckets, None)
