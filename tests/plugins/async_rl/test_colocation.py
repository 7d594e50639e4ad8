"""Trainer and engines on one device take turns, whatever fails: a real pool, with scripted members and trainer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from every_run import SOAK
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from scripted_members import ScriptedMember, World, reference

from spurline.errors import RunFailedError
from spurline_async_rl.engines import pool as pools
from spurline_async_rl.engines.commands import Command, Sleep, Wake
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.engines.response import Progress
from spurline_async_rl.source.colocation import Colocation
from spurline_async_rl.source.loop_thread import LoopThread
from spurline_async_rl.weights.buckets import BucketSync
from spurline_async_rl.weights.configs import BucketSyncConfig
from spurline_models.weight_buckets import PublishedPart, WeightBucket
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, Sampling
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


COMMANDS = ("sleep", "wake", "begin_update", "load_bucket", "finish_update", "start", "generate")
PATIENCE_S = 30.0


class Turns:
    """A colocated run without data: what the source does with its engines and its trainer."""

    def __init__(self, *, engines: int = 2, offloads_trainer: bool = False, **limits: Any) -> None:
        self.device = Device(offloads_trainer=offloads_trainer)
        self.world = SharingWorld(self.device)
        self.trainer = SharingTrainer(self.device)
        self.loop = LoopThread("turns")
        short = {"pause_timeout_s": 0.2, "update_timeout_s": 0.2, "start_timeout_s": 0.2, "generate_timeout_s": 0.3}
        self.pool = self.loop.call(lambda: self.world.pool(engines, **{**short, "max_restarts": 25, **limits}))
        self.publisher = PlainPublisher(self.pool, self.loop)
        backend: Any = self.trainer
        publisher: Any = self.publisher
        self.colocation = Colocation(
            self.pool, backend, publisher, self.loop, offloads_trainer=offloads_trainer, watchdog_s=60.0
        )
        self.flying: list[tuple[GenerationRequest, concurrent.futures.Future[GenerationResult]]] = []
        self._seeds = itertools.count(1)

    def ask(self, requests: int) -> None:
        """Further requests, which go on over turns until they are answered."""
        for seed in itertools.islice(self._seeds, requests):
            request = GenerationRequest([seed], Sampling(max_new_tokens=12), seed=seed, name=f"request {seed}")
            self.flying.append((request, self.loop.start(self.pool.generate(request))))

    def turn(self, *, until: int, keep_weights: bool) -> None:
        """The engines' turn, until no more than so many requests are in flight."""
        self.colocation.give(self.trainer.updates)
        deadline = time.monotonic() + PATIENCE_S
        while len(self.flying) > until:
            if awaiting := self.pool.awaiting_weights:
                self.colocation.serve(self.trainer.updates, awaiting)
            self._collect()
            assert time.monotonic() < deadline, f"nothing goes on: {[engine.state for engine in self.pool._engines]}"
            time.sleep(0.001)
        self.colocation.take_back(keep_weights=keep_weights)

    def close(self) -> None:
        self.loop.run(self.pool.close(), PATIENCE_S, "closing")
        for request, answer in self.flying:
            try:
                assert answer.result(PATIENCE_S).token_ids.tolist() == reference(request)[0]
            except (RunFailedError, concurrent.futures.CancelledError):
                # It was in flight.
                continue
        self.loop.close()
        assert all(member.is_closed for member in self.world.members if member.has_begun)
        assert not self.device.engines
        assert not self.device.clashes

    def _collect(self) -> None:
        done = [entry for entry in self.flying if entry[1].done()]
        self.flying = [entry for entry in self.flying if not entry[1].done()]
        for request, answer in done:
            result = answer.result()
            assert result.token_ids.tolist() == reference(request)[0]
            versions = result.versions.tolist()
            assert versions == sorted(versions)
            assert versions[0] >= 0, versions
            assert versions[-1] <= self.trainer.updates, versions


@pytest.fixture
def turns() -> Iterator[Turns]:
    """Two engines and much time."""
    made = Turns(start_timeout_s=20.0, pause_timeout_s=20.0, update_timeout_s=20.0, generate_timeout_s=20.0)
    yield made
    made.close()


def states(turns: Turns) -> list[str]:
    return [engine.state for engine in turns.pool._engines]


def test_an_engine_that_is_started_anew_when_the_turn_ends_is_waited_for_and_sleeps_with_the_others(
    turns: Turns,
) -> None:
    turns.colocation.start()
    turns.colocation.give(0)
    started = turns.world.slow_start = turns.loop.call(asyncio.Event)
    turns.loop.call(turns.world.members[1].die)
    deadline = time.monotonic() + PATIENCE_S
    while len(turns.world.members) < 3 or not turns.world.members[2].has_begun:
        assert time.monotonic() < deadline, states(turns)
        time.sleep(0.001)
    turns.loop.submit(lambda: asyncio.get_running_loop().call_later(0.1, started.set))
    turns.colocation.take_back(keep_weights=False)
    assert states(turns) == ["awaiting", "awaiting"]
    turns.trainer.update()
    turns.colocation.give(1)
    assert states(turns) == ["ready", "ready"]
    assert [member.version for member in turns.world.members] == [1, 0, 1]
    turns.colocation.take_back(keep_weights=True)


def test_an_engine_that_dies_asleep_takes_no_memory_before_it_is_the_engines_turn(turns: Turns) -> None:
    turns.colocation.start()
    for member in list(turns.world.members):
        turns.loop.call(member.die)
    time.sleep(0.1)
    assert len([member for member in turns.world.members if member.has_begun]) == 2
    turns.trainer.update()
    turns.ask(3)
    turns.turn(until=0, keep_weights=False)
    assert len([member for member in turns.world.members if member.has_begun]) == 4


def test_engines_that_have_the_weights_are_not_sent_them_again(turns: Turns) -> None:
    turns.colocation.start()
    assert turns.colocation.give(0) is not None
    turns.colocation.take_back(keep_weights=True)
    assert turns.colocation.give(0) is None
    turns.colocation.take_back(keep_weights=False)
    assert turns.colocation.give(0) is not None
    turns.colocation.take_back(keep_weights=False)


def test_weights_below_adapters_are_kept_since_nothing_brings_them_back(turns: Turns) -> None:
    turns.pool.takes_adapters = True
    turns.colocation.start()
    turns.colocation.give(0)
    turns.colocation.take_back(keep_weights=False)
    assert states(turns) == ["ready", "ready"]
    assert turns.colocation.give(0) is None
    turns.colocation.take_back(keep_weights=False)


class ColocationMachine(RuleBasedStateMachine):
    """What a run may do, with anything failing at any time. `ended` when a change has raised: so does all after it."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: Turns | None = None
        self.ended = False

    @precondition(lambda self: self.turns is None)
    @rule(engines=st.integers(1, 3), offloads=st.booleans())
    def start(self, engines: int, offloads: bool) -> None:
        self.turns = Turns(engines=engines, offloads_trainer=offloads)
        self._try(self.turns.colocation.start)

    @precondition(lambda self: self.turns is not None)
    @rule(command=st.sampled_from(COMMANDS), how=st.sampled_from(("fail", "hang", "die")))
    def break_engine(self, command: str, how: str) -> None:
        self._turns.world.faults[command] = how

    @precondition(lambda self: self.turns is not None)
    @rule(what=st.sampled_from(("yield_device", "take_device", "named_weights")), interrupts=st.booleans())
    def break_trainer(self, what: str, interrupts: bool) -> None:
        failure = KeyboardInterrupt() if interrupts and what != "named_weights" else broken(what)
        self._turns.trainer.failures[what] = failure

    @precondition(lambda self: self.turns is not None)
    @rule(which=st.integers(0, 2))
    def kill_engine(self, which: int) -> None:
        """While it sleeps, as it is between turns."""
        turns = self._turns
        turns.loop.call(lambda: [member.die() for member in turns.world.members[-3:][which : which + 1]])

    @precondition(lambda self: self.turns is not None)
    @rule(requests=st.integers(0, 4), left=st.integers(0, 2), trains=st.booleans())
    def step(self, requests: int, left: int, trains: bool) -> None:
        """A step that leaves responses in flight, or an evaluation."""
        turns = self._turns
        turns.ask(requests)
        self._try(lambda: turns.turn(until=left if trains else 0, keep_weights=not trains))
        if self.ended:
            return
        assert not turns.publisher.has_failed, "goes on after a failed publish"
        assert not turns.trainer.failures.keys() & {"yield_device", "take_device"}, "goes on after a failed change"
        if trains:
            turns.trainer.update()

    @invariant()
    def trainer_and_engines_never_have_the_memory_together(self) -> None:
        if self.turns is not None:
            assert not self.turns.device.clashes

    @invariant()
    def nothing_goes_on_after_a_failed_change(self) -> None:
        if self.turns is not None and self.ended:
            with pytest.raises(RunFailedError, match="memory of the devices failed earlier"):
                self.turns.colocation.give(self.turns.trainer.updates)

    def teardown(self) -> None:
        if self.turns is not None:
            self.turns.world.faults.clear()
            self.turns.close()

    @property
    def _turns(self) -> Turns:
        assert self.turns is not None
        return self.turns

    def _try(self, change: Any) -> None:
        if self.ended:
            return
        try:
            change()
        except (RunFailedError, KeyboardInterrupt):
            self.ended = True


@pytest.fixture(autouse=True)
def without_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_LONGEST_BREAK_S", 0.001)


@pytest.mark.slow
def test_no_order_of_failures_gives_the_memory_to_both_or_trains_after_a_failed_publish() -> None:
    limits = settings(
        max_examples=600 if SOAK else 40,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(ColocationMachine, settings=limits)
