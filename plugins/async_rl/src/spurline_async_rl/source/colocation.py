"""Whose turn it is on devices that engines and trainer share: a state machine that owns their memory.

Place on the way: the source, on the training thread, before and after it waits for engines -> backend and engines, one
after the other. Nothing else moves memory, and every step of a change waits for the one before:

    trainer -> what its optimizers keep leaves -> engines' weights come -> publish -> what it took leaves, and the
            trainer's weights, if they are to -> engines' cache comes -> engines
    engines -> their cache and weights leave -> everything of the trainer comes -> trainer

So at any time at most the weights of both are there, and never a cache beside an optimizer's state. A change that fails
leaves the memory to nobody, and the run ends: nothing is trained or generated after it. An engine that dies is
different: the others go on, and it is started again when engines have the memory, never while the trainer has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast

from spurline.errors import RunFailedError
from spurline.protocols.backend import Backend, YieldsDevice
from spurline_async_rl.source.loop_thread import GRACE_S, LoopThread, ends_the_run
from spurline_async_rl.source.watchdog import tell
from spurline_rl.protocols.rollout_engine import EngineMemory, TakesWeights
from spurline_rl.protocols.weight_sync import SyncReport

Owner = Literal["trainer", "engines", "nobody"]


class SleepingEngine(Protocol):
    """An engine that both `TakesWeights` and `MaySleep`."""

    takes_adapters: bool
    longest_start_s: float

    async def sleep(self, *, keep_weights: bool) -> None: ...
    async def wake(self, part: EngineMemory) -> None: ...


class Publishes(Protocol):
    """The part of a `Publisher` that `Colocation` needs."""

    def start_engines(self) -> None: ...
    def publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights] | None = None) -> SyncReport: ...


class Colocation:
    """The owner of the devices' memory. All methods are called on the training thread.

    Each raises RunFailedError if memory does not change hands, or did not before.

    offloads_trainer: whether the trainer's weights leave too. engines_have: version of the weights that all engines
    hold, asleep or awake; None when they hold none of a known version.
    """

    def __init__(
        self,
        engine: SleepingEngine,
        backend: YieldsDevice,
        publisher: Publishes,
        loop: LoopThread,
        *,
        offloads_trainer: bool,
        watchdog_s: float,
    ) -> None:
        self.owner: Owner = "trainer"
        self.engines_have: int | None = None
        self._engine = engine
        self._backend = backend
        self._publisher = publisher
        self._loop = loop
        self._offloads_trainer = offloads_trainer
        self._watchdog_s = watchdog_s
        self._failure: BaseException | None = None
        self._seconds = {"time/to_engines": 0.0, "time/to_trainer": 0.0}

    def start(self) -> None:
        """Start the engines where the trainer leaves them room, and send them to sleep."""
        with self._passing("trainer", "engines", "starting the engines"):
            self._backend.yield_device(keep_weights=not self._offloads_trainer)
            self._publisher.start_engines()
        self.take_back(keep_weights=False)

    def give(self, version: int) -> SyncReport | None:
        """Return when engines generate with the weights of this version, which are the backend's now.

        Returns the report of publishing them; None if engines had them already.
        """
        report: SyncReport | None = None
        with self._passing("trainer", "engines", "giving it to the engines"):
            # What an update keeps goes first: while weights are sent, those of both sides and a bucket are there.
            self._backend.yield_device(keep_weights=True)
            self._wake("weights")
            if self.engines_have != version:
                report = self._publisher.publish(version, cast("Backend", self._backend))
                self.engines_have = version
            # Also where weights stay: what they were gathered in for the publish is free only now.
            self._backend.yield_device(keep_weights=not self._offloads_trainer)
            self._wake("cache")
        return report

    def take_back(self, *, keep_weights: bool) -> None:
        """Return when the trainer can train. keep_weights: engines need them again, before others are published."""
        # Adapters alone are published on weights that nothing brings back.
        keeps = keep_weights or self._engine.takes_adapters
        with self._passing("engines", "trainer", "giving it back to the trainer"):
            if not keeps:
                self.engines_have = None
            self._run(self._engine.sleep(keep_weights=keeps), "Sending the engines to sleep")
            self._backend.take_device()

    def serve(self, version: int, engines: Sequence[TakesWeights]) -> None:
        """Bring these weights to engines that were started again, while it is the engines' turn."""
        if not self._offloads_trainer:
            with self._passing("engines", "engines", "publishing to an engine that was started again"):
                self._publisher.publish(version, cast("Backend", self._backend), engines)
                self._backend.yield_device(keep_weights=True)
            return
        # The trainer's weights come back first, for which there is room only while engines sleep.
        self.take_back(keep_weights=True)
        self.engines_have = None
        self.give(version)

    def take_seconds(self) -> dict[str, float]:
        """`time/to_engines` and `time/to_trainer`: what changes took since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    @contextmanager
    def _passing(self, owner: Owner, to: Owner, what: str) -> Generator[None]:
        """Pass the memory on with the code inside. An error leaves it to nobody, for good."""
        if self._failure is not None:
            raise RunFailedError(
                f"The memory of the devices was lost to trainer and engines before {what}: {self._failure}"
            ) from self._failure
        assert self.owner == owner, f"the memory is that of {self.owner}: {what}"
        self.owner = "nobody"
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise
        self.owner = to
        self._seconds["time/to_trainer" if to == "trainer" else "time/to_engines"] += time.perf_counter() - began

    def _wake(self, part: EngineMemory) -> None:
        self._run(self._engine.wake(part), f"Giving the engines the memory of their {part}")

    def _run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        # Longer than a start, which falling asleep waits for when one is under way.
        limit = self._engine.longest_start_s + GRACE_S
        still: Callable[[float], None] = lambda passed_s: tell(f"{what} has taken {passed_s:.0f} s so far.")  # noqa: E731
        with ends_the_run(what):
            self._loop.run(work, limit, what, every_s=self._watchdog_s, still=still)
