"""Publish weights bucket by bucket: what all transports share, and the one that has nothing else to do.

Place on the way: the backend, on a thread -> buckets, one at a time -> every engine at once. A transport has two sides:
the sync, here, tells the engines; its maker makes the buckets where the weights are, in this process or in a rank of
the backend. What an engine does with a bucket is the engine's business.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spurline.errors import ConfigError, RunFailedError
from spurline.plugins.registry import resolve
from spurline.protocols.backend import MakesBuckets
from spurline.protocols.rollout_engine import TakesWeights, TensorPlace, WeightBucket
from spurline.protocols.weight_sync import BucketMaker, MakerChoice, SyncReport
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
    """A `WeightSync` that sends buckets. Subclass with `transport` and `make_buckets`, or derive from `MakerSync`."""

    transport: str

    def __init__(self, config: BucketSyncConfig, run: RunConfig | None = None) -> None:
        """run: the whole config, which says where the weights are, and the run directory; without it they are here.

        Raises ConfigError where this transport cannot work.
        """
        if config.needs_gpu:
            _require_gpu(self.transport, run)
        self._config = config
        self.timeout_s = config.timeout_s
        self.max_bucket_bytes = config.bucket_mb << 20
        self.waits_for = ""

    @abstractmethod
    def make_buckets(self, version: int, backend: Backend) -> Iterator[WeightBucket]:
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
        buckets = self.make_buckets(version, backend)
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


class MakerSync(BucketSync):
    """A `BucketSync` whose buckets any process can make that has the weights. Subclass with `transport` and `maker`.

    maker: "module:Class" of its `BucketMaker`.
    """

    maker: str
    _own: BucketMaker | None = None

    def maker_settings(self) -> dict[str, Any]:
        """Arguments of the maker, as JSON can hold them."""
        return {}

    def make_buckets(self, version: int, backend: Backend) -> Iterator[WeightBucket]:
        choice = MakerChoice(self.maker, self.maker_settings(), self.max_bucket_bytes)
        if isinstance(backend, MakesBuckets):
            yield from backend.weight_buckets(version, choice)
            return
        if self._own is None:
            made: BucketMaker = resolve(choice.maker, f"maker of weight_sync '{self.transport}'")(**choice.settings)
            self._own = made
        for number, held in enumerate(cut(backend.named_weights(), self.max_bucket_bytes), 1):
            yield self._own.make(version, number, held)
            # The next one may need the memory.
            held.clear()
            self._own.taken()

    def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.close()


class InProcessSync(BucketSync):
    """A `WeightSync` that hands the tensors themselves to an engine in this process, which copies them.

    Both sides see the same memory, so there is nothing that a checksum could find.
    """

    transport = "in_process"

    def make_buckets(self, version: int, backend: Backend) -> Iterator[WeightBucket]:
        for held in cut(backend.named_weights(), self.max_bucket_bytes):
            places = tuple(TensorPlace.of(name, tensor) for name, tensor in held)
            yield WeightBucket(self.transport, places, tensors=tuple(tensor for _, tensor in held))


def weights_on_gpu(run: RunConfig | None) -> bool:
    """Whether the backend has its weights on GPUs, of this process or of its ranks."""
    request = None if run is None else run.backend.rank_request()
    return torch.cuda.is_available() if request is None else request.device == "cuda"


def _require_gpu(transport: str, run: RunConfig | None) -> None:
    if not weights_on_gpu(run):
        lack = "torch sees no GPU. Set weight_sync: shared_memory, or check nvidia-smi."
        if run is not None and run.backend.rank_request() is not None:
            lack = f"backend '{run.backend.name}' has its weights on CPUs. Set weight_sync: shared_memory."
        raise ConfigError.at("source.weight_sync.name", f"is {transport}, which sends from GPU to GPU, but {lack}")
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


def _next(buckets: Iterator[WeightBucket]) -> WeightBucket | None:
    return next(buckets, None)
