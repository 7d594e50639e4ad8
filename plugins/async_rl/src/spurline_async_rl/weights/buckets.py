"""Publish weights in buckets: the base of all transports, the transport within a process, and the packing of buckets.

A transport has two parts. A `BucketMaker` makes buckets in a process that has the weights: the controller or a rank of
the backend. A `BucketSync` in the controller sends each bucket to all engines at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from spurline.errors import BucketLostError, ConfigError, RunFailedError, listing
from spurline.plugins.registry import resolve
from spurline_async_rl.engines.commands import BeginAdapterUpdate, BeginUpdate, Command, FinishUpdate, LoadBucket
from spurline_async_rl.weights.changes import CHANGES_MAKER
from spurline_async_rl.weights.configs import BucketSyncConfig
from spurline_concurrency.calls import in_thread
from spurline_models.abilities import TrainsAdapters
from spurline_models.backend_config import adapters_of
from spurline_models.weight_buckets import (
    BucketMaker,
    MakerChoice,
    MakesBuckets,
    PublishedPart,
    TensorPlace,
    WeightBucket,
)
from spurline_rl.protocols.rollout_engine import TakesWeights
from spurline_rl.protocols.weight_sync import SyncReport

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig
    from spurline.protocols.backend import Backend

_LOOK_S = 1.0
"""Seconds between two checks for engines that have died, while weights are being sent."""
_MOST_LOSSES = 3
"""A publish fails if one bucket is lost more often than this."""

_ALIGNMENT = 64


@dataclass
class _Progress:
    """The number of buckets that all engines have taken, their bytes, and how often the next bucket was lost."""

    taken: int = 0
    sent: int = 0
    losses: int = 0


class BucketSync:
    """A `WeightSync` that sends buckets of a `BucketMaker`.

    Attributes:
        maker: The class of the `BucketMaker`, as "module:Class".
        made_by: The ranks that make buckets; see `MakerChoice`.
        makes_ahead: Whether the next bucket is made while engines still load the current bucket.
    """

    transport: str
    maker: str
    made_by: Literal["first", "owners", "all"] = "first"
    makes_ahead = False
    _own: BucketMaker | None = None
    _own_choice: MakerChoice | None = None

    def __init__(self, config: BucketSyncConfig, run: RunConfig | None = None) -> None:
        """Prepare to send the weights of this run's backend. If `run` is None, the weights are in this process.

        Raises:
            ConfigError: If the transport needs weights on GPUs, and they are on CPUs.
        """
        if config.needs_gpu and not weights_on_gpu(run):
            whose = "" if run is None else f" '{run.backend.name}'"
            raise ConfigError.at(
                "source.weight_sync.name",
                f"is {self.transport}, which works only on GPUs, but backend{whose} has its weights on CPUs. Choose "
                "another weight_sync, such as shared_memory or disk.",
            )
        self._config = config
        self.timeout_s = config.timeout_s
        self.max_bucket_bytes = config.bucket_mb << 20
        self.waits_for = ""
        lora = None if run is None else adapters_of(run)
        self._chain = 0
        self._chain_length = 0
        self._last_version = 0
        # The engines that have the last version.
        self._up_to_date: set[str] = set()
        # None means that the first publish decides.
        self._sends_adapters = None if config.adapters and (lora is None or lora.merged_because is None) else False

    def maker_settings(self) -> dict[str, Any]:
        """Return the maker's arguments, as plain values."""
        return {}

    def make_buckets(
        self, version: int, backend: Backend, first: int = 1, dtype: str | None = None, part: PublishedPart = "model"
    ) -> Iterator[WeightBucket]:
        """Yield the buckets from number `first` on. This runs on a thread. See `MakerChoice` for `dtype` and `part`."""
        name, settings = self.maker, self.maker_settings()
        if part == "model" and self._config.whole_every > 1:
            name, settings = CHANGES_MAKER, {"maker": name, "settings": settings, "chain": self._chain}
        choice = MakerChoice(name, settings, self.max_bucket_bytes, dtype, part, self.made_by)
        if isinstance(backend, MakesBuckets):
            yield from backend.weight_buckets(version, choice, first)
            return
        if self._own is None or choice != self._own_choice:
            if self._own is not None:
                self._own.close()
            made: BucketMaker = resolve(choice.maker, f"maker of weight_sync '{self.transport}'")(**choice.settings)
            self._own, self._own_choice = made, choice
        maker = self._own
        buckets = cut(in_dtype(weights_of(backend, part), dtype), self.max_bucket_bytes)
        for number, held in enumerate(buckets, 1):
            if number < first:
                continue
            yield maker.make(version, number, held)
            # Free this bucket before the next one is made.
            held.clear()
            if not self.makes_ahead:
                maker.taken()
        if self.makes_ahead:
            maker.taken()

    def close(self) -> None:
        """Free memory, files and connections."""
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def prepare(self, receivers: Mapping[str, int], *, is_lost: bool) -> None:
        """Prepare to send to these receivers; see `TakesWeights`. `is_lost` is true after a lost bucket."""

    def note_receivers(self, receivers: Mapping[str, int]) -> None:
        """Note the receivers that still run. This is called every second while buckets are sent."""

    def check(self, bucket: WeightBucket) -> None:
        """Raise BucketLostError if this bucket has, instead of weights, a message that the previous bucket was lost."""

    async def publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights]) -> SyncReport:
        limit_s = self._config.timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._publish(version, backend, engines)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RunFailedError(
                f"Publishing version {version} over {self.transport} did not end within {limit_s:g} s. It waited for "
                f"{self.waits_for}. If it was only slow, raise source.weight_sync.timeout_s."
            ) from error

    async def _publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights]) -> SyncReport:
        began = time.perf_counter()
        adapter = await self._adapter_to_send(backend, engines)
        begin = BeginUpdate(version) if adapter is None else BeginAdapterUpdate(version, adapter)
        await self._tell(engines, "to begin an update", begin)
        sending = time.perf_counter()
        self._continue_chain(version, engines)
        sent = await self._send_all(version, backend, engines, "model" if adapter is None else "adapter")
        finishing = time.perf_counter()
        self._up_to_date |= _receivers(engines).keys()
        await self._tell(engines, "to finish the update", FinishUpdate(version))
        return SyncReport(version, sent, finishing - sending, time.perf_counter() - began)

    def _continue_chain(self, version: int, engines: Sequence[TakesWeights]) -> None:
        """Begin a chain of publishes with whole weights, if the old one is full or an engine lacks the last version."""
        if self._chain_length >= self._config.whole_every or not _receivers(engines).keys() <= self._up_to_date:
            self._chain, self._chain_length = self._chain + 1, 0
        self._chain_length += 1
        if version != self._last_version:
            self._last_version, self._up_to_date = version, set()

    async def _adapter_to_send(self, backend: Backend, engines: Sequence[TakesWeights]) -> Mapping[str, Any] | None:
        """Return the settings of the adapter if only the adapter is sent, or None for whole weights."""
        if self._sends_adapters is False:
            return None
        self.waits_for = "the settings of the backend's adapter"
        settings = await in_thread(backend.adapter_settings) if isinstance(backend, TrainsAdapters) else None
        engines_take_them = all(engine.takes_adapters for engine in engines)
        if self._sends_adapters is None:
            self._sends_adapters = settings is not None and engines_take_them
        elif not engines_take_them:
            # The weights of such an engine may have an older adapter merged into them.
            raise RunFailedError(
                "An engine was started that takes no adapters, but earlier engines were sent only adapters. Start "
                "engines of one kind, or set source.weight_sync.adapters: false."
            )
        return settings if self._sends_adapters else None

    async def _send_all(
        self, version: int, backend: Backend, engines: Sequence[TakesWeights], part: PublishedPart
    ) -> int:
        """Send all weights, and return the bytes sent. A lost bucket is sent again to the engines that still run."""
        # Adapters are small, so they are sent in their own dtype.
        dtypes = {engine.weights_dtype for engine in engines} if part == "model" else set()
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        progress = _Progress()
        while True:
            self.waits_for = "the preparation of the transport"
            # `prepare` may use the network, so it runs on a thread.
            await in_thread(self.prepare, _receivers(engines), is_lost=progress.losses > 0)
            buckets = self.make_buckets(version, backend, progress.taken + 1, dtype, part)
            watch = asyncio.ensure_future(self._watch(engines))
            try:
                await self._send(buckets, engines, progress)
                return progress.sent
            except BucketLostError as error:
                progress.losses += 1
                self._chain += 1
                if progress.losses > _MOST_LOSSES:
                    raise RunFailedError(
                        f"Publishing version {version} over {self.transport}: bucket {progress.taken + 1} was lost "
                        f"{progress.losses} times. {error}"
                    ) from error
            finally:
                watch.cancel()

    async def _watch(self, engines: Sequence[TakesWeights]) -> None:
        """Tell the transport which engines still run, so that it does not wait long for a dead engine."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.note_receivers(_receivers(engines))

    async def _send(
        self, buckets: Iterator[WeightBucket], engines: Sequence[TakesWeights], progress: _Progress
    ) -> None:
        self.waits_for = "the backend's first weights"
        bucket = await in_thread(_next, buckets)
        while bucket is not None:
            self.check(bucket)
            size = bucket_bytes(bucket.places)
            following = asyncio.ensure_future(in_thread(_next, buckets)) if self.makes_ahead else None
            try:
                await self._tell(engines, f"to load bucket {progress.taken + 1}", LoadBucket(bucket))
            except BucketLostError:
                if following is not None:
                    # The backend can make only one bucket at a time, so wait for the one that it is making.
                    self.waits_for = "the backend's weights after a lost bucket"
                    await following
                raise
            except BaseException:
                if following is not None:
                    following.cancel()
                raise
            progress.taken, progress.sent, progress.losses = progress.taken + 1, progress.sent + size, 0
            # Free this bucket before the next one is made.
            del bucket
            self.waits_for = f"the backend's weights after bucket {progress.taken}"
            bucket = await (in_thread(_next, buckets) if following is None else following)

    async def _tell(self, engines: Sequence[TakesWeights], what: str, command: Command) -> None:
        """Send a command to all engines, wait for all answers, and raise the first error."""
        names = _receivers(engines)
        self.waits_for = f"{listing(names) if names else f'{len(engines)} engine(s)'} {what}"
        answers = await asyncio.gather(*map(command.apply, engines), return_exceptions=True)
        # Raise other errors before a BucketLostError, because a bucket is sent again only if nothing else went wrong.
        for answer in sorted(filter(None, answers), key=lambda answer: isinstance(answer, BucketLostError)):
            raise answer


class InProcessSync(BucketSync):
    """A `WeightSync` that passes the tensors to an engine in this process. The engine copies them."""

    transport = "in_process"

    def make_buckets(
        self, version: int, backend: Backend, first: int = 1, dtype: str | None = None, part: PublishedPart = "model"
    ) -> Iterator[WeightBucket]:
        assert first == 1, "nothing is lost within a process"
        for held in cut(weights_of(backend, part), self.max_bucket_bytes):
            places = tuple(TensorPlace.of(name, tensor) for name, tensor in held)
            yield WeightBucket(self.transport, places, tensors=tuple(tensor for _, tensor in held))


def weights_of(backend: Backend, part: PublishedPart) -> Iterator[tuple[str, Tensor]]:
    """Return the weights that a backend in this process publishes."""
    if part == "model":
        return backend.named_weights()
    assert isinstance(backend, TrainsAdapters), type(backend)
    return backend.named_adapter_weights()


def weights_on_gpu(run: RunConfig | None) -> bool:
    """Return whether the backend has its weights on GPUs, of this process or of its ranks."""
    request = None if run is None else run.backend.rank_request()
    if request is not None:
        return request.device == "cuda"
    return torch.cuda.is_available() and (run is None or not run.backend.facts.stays_on_cpu)


def in_dtype(weights: Iterable[tuple[str, Tensor]], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Convert floating-point weights to a dtype such as `bfloat16`, unless it is None."""
    wanted: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    for name, tensor in weights:
        yield name, tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor


def _receivers(engines: Sequence[TakesWeights]) -> dict[str, int]:
    return {name: count for engine in engines for name, count in engine.receivers.items()}


def _next(buckets: Iterator[WeightBucket]) -> WeightBucket | None:
    return next(buckets, None)


def cut(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Divide weights, in order, into lists of at most `max_bytes`. A larger tensor is alone in its list."""
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


def places_of(weights: Iterable[tuple[str, Tensor]]) -> tuple[TensorPlace, ...]:
    places: list[TensorPlace] = []
    end = 0
    for name, tensor in weights:
        places.append(TensorPlace.of(name, tensor, -(-end // _ALIGNMENT) * _ALIGNMENT))
        end = end_of(places[-1:])
    return tuple(places)


def end_of(places: Sequence[TensorPlace]) -> int:
    """Return the offset at which the last of these places ends."""
    return max((place.offset + bucket_bytes([place]) for place in places), default=0)


def bucket_bytes(places: Sequence[TensorPlace]) -> int:
    return sum(math.prod(place.shape) * getattr(torch, place.dtype).itemsize for place in places)


def pack(
    weights: Iterable[tuple[str, Tensor]], buffer: Tensor | None, device: torch.device
) -> tuple[Tensor, tuple[TensorPlace, ...]]:
    """Copy weights into a buffer, uint8 [bytes] on the device, and return it with the place of each weight.

    The given buffer is used if it is large enough.
    """
    held = list(weights)
    places = places_of(held)
    buffer = room(buffer, end_of(places), device)
    fill(buffer, places, held)
    return buffer, places


def room(buffer: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Return this buffer if it has at least `size` bytes, or else a new one."""
    if buffer is not None and len(buffer) >= size:
        return buffer
    return torch.empty(max(size, 1), dtype=torch.uint8, device=device)


def fill(buffer: Tensor, places: Sequence[TensorPlace], weights: Iterable[tuple[str, Tensor]]) -> None:
    for (_, view), (_, tensor) in zip(unpack(buffer, places), weights, strict=True):
        view.copy_(tensor.detach())


def unpack(buffer: Tensor, places: Sequence[TensorPlace]) -> list[tuple[str, Tensor]]:
    """Return names and weights. The weights are views of the buffer."""
    weights: list[tuple[str, Tensor]] = []
    for place in places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        flat = buffer[place.offset : end_of([place])].view(dtype)
        weights.append((place.name, flat.view(place.shape)))
    return weights
