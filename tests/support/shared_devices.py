"""A device whose memory a scripted trainer and scripted engines share, and which notes when both have it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from scripted_members import ScriptedMember, World

from spurline.errors import RunFailedError
from spurline_async_rl.engines.commands import Command, Sleep, Wake
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.engines.response import Progress
from spurline_async_rl.source.loop_thread import LoopThread
from spurline_async_rl.weights.buckets import BucketSync
from spurline_async_rl.weights.configs import BucketSyncConfig
from spurline_models.weight_buckets import PublishedPart, WeightBucket
from spurline_rl.protocols.rollout_engine import GenerationRequest
from spurline_rl.protocols.weight_sync import SyncReport
from spurline_rl.trajectory import FinishReason

EVERYTHING = frozenset({"weights", "cache"})


class Device:
    """Who has what on it. clashes: what must never be, in words.

    The trainer has `state`, what its optimizers keep, `weights`, and `gathered`, what weights were made whole in for
    engines; an engine `weights` and `cache`.
    """

    def __init__(self, *, offloads_trainer: bool) -> None:
        self.trainer = {"state", "weights"}
        self.engines: dict[str, set[str]] = {}
        self.clashes: list[str] = []
        self._offloads_trainer = offloads_trainer
        self._lock = threading.Lock()

    def set_trainer(self, parts: set[str]) -> None:
        with self._lock:
            self.trainer = parts
            self._check("trainer")

    def take(self, engine: str, *parts: str) -> None:
        with self._lock:
            self.engines.setdefault(engine, set()).update(parts)
            self._check(engine)

    def free(self, engine: str) -> None:
        with self._lock:
            self.engines.pop(engine, None)

    def check_after_publish(self, engine: str) -> None:
        """Note a clash if gathered weights remain when a cache wakes up."""
        with self._lock:
            if "gathered" in self.trainer:
                self.clashes.append(f"{engine} woke its cache: trainer has {self.trainer}")

    def _check(self, who: str) -> None:
        of_engines = {part for parts in self.engines.values() for part in parts}
        forbidden = {"state"} if of_engines else set[str]()
        if "cache" in of_engines and self._offloads_trainer:
            forbidden.add("weights")
        if self.trainer & forbidden:
            self.clashes.append(f"{who} took memory: trainer has {self.trainer}, engines {self.engines}")


class SharingWorld(World):
    """faults: name of a command, or `start`, or `generate` -> what the next engine that gets to it does: `fail`, `hang`
    or `die`."""

    members: list[SharingMember]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.faults: dict[str, str] = {}

    def _make_member(self, number: int) -> SharingMember:
        member = SharingMember(f"engine {number} life {len(self.members)}", self)
        self.members.append(member)
        return member


class SharingMember(ScriptedMember):
    """Has memory from the beginning of its start to its death or the end of `close`, unless it sleeps."""

    _world: SharingWorld
    has_begun = False

    async def start(self) -> None:
        self.has_begun = True
        self._take("weights", "cache")
        await self._act("start")

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        while self._holds:
            await self._go.wait()
        try:
            return await super().generate(request, progress)
        except RuntimeError as error:
            # A member that has failed generates no further token.
            raise EngineDiedError(f"{self.name} failed: {error}") from error

    async def control(self, command: Command) -> None:
        if isinstance(command, Wake):
            if command.part == "cache":
                self._world.device.check_after_publish(self.name)
            self._take(command.part)
        await super().control(command)
        if isinstance(command, Sleep):
            self._world.device.free(self.name)
            if not command.keep_weights:
                self.version = -1

    async def close(self) -> None:
        try:
            # Closing takes longer than any other event.
            await asyncio.sleep(0.01)
        finally:
            # Members free their memory also when cancelled.
            self._world.device.free(self.name)
            await super().close()

    def die(self) -> None:
        """Die as a killed process does."""
        self._dead.set()
        self._world.device.free(self.name)

    async def _act(self, what: str) -> None:
        await asyncio.sleep(0)
        if self._dead.is_set():
            raise EngineDiedError(f"{self.name} is dead")
        fault = self._world.faults.pop(what, "")
        if fault == "fail":
            raise RuntimeError(f"cannot {what}")
        if fault == "die":
            self.die()
        if fault:
            await asyncio.Event().wait()

    def _take(self, *parts: str) -> None:
        if not self._dead.is_set():
            self._world.device.take(self.name, *parts)


class SharingTrainer:
    """Trains by counting. failures: name of a method -> what its next call raises, before it has done anything, or
    half-way where it yields."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.updates = 0
        self.failures: dict[str, BaseException] = {}

    def yield_device(self, *, keep_weights: bool) -> None:
        self.device.set_trainer(self.device.trainer - {"state", "gathered"})
        self._fail("yield_device")
        if not keep_weights:
            self.device.set_trainer(set())

    def take_device(self) -> None:
        self._fail("take_device")
        self.device.set_trainer({"state", "weights"})

    def update(self) -> None:
        assert self.device.trainer == {"state", "weights"}, f"trains with {self.device.trainer}"
        assert not any(self.device.engines.values()), f"trains beside {self.device.engines}"
        self.updates += 1

    def named_weights(self) -> Iterator[WeightBucket]:
        """Yield one bucket, which needs the weights."""
        assert "weights" in self.device.trainer, "publishes weights that are not there"
        self.device.set_trainer(self.device.trainer | {"gathered"})
        yield WeightBucket("in_process", ())
        self._fail("named_weights")

    def _fail(self, what: str) -> None:
        if what in self.failures:
            raise self.failures.pop(what)


class CountedSync(BucketSync):
    """Sends buckets without weights."""

    transport = "in_process"

    def make_buckets(
        self, version: int, backend: Any, first: int = 1, dtype: str | None = None, part: PublishedPart = "model"
    ) -> Iterator[WeightBucket]:
        assert version == backend.updates, f"publishes {backend.updates} updates as version {version}"
        return backend.named_weights()


class PlainPublisher:
    """A `Publisher` without a run. has_failed: whether a publish has failed."""

    def __init__(self, pool: EnginePool, loop: LoopThread) -> None:
        self.has_failed = False
        self._pool = pool
        self._loop = loop
        self._sync = CountedSync(BucketSyncConfig(name="in_process", timeout_s=5.0))

    def start_engines(self) -> None:
        self._loop.run(self._pool.start(), 30.0, "starting")

    def publish(self, version: int, backend: Any, engines: Sequence[Any] | None = None) -> SyncReport:
        try:
            if engines is None:
                self._loop.run(self._pool.wait_for_one(), 30.0, "waiting for an engine")
            return self._loop.run(self._sync.publish(version, backend, engines or [self._pool]), 10.0, "publishing")
        except BaseException:
            self.has_failed = True
            raise


def broken(what: str) -> RunFailedError:
    return RunFailedError(f"{what} is broken")
