"""Pass the memory of devices between trainer and colocated engines: a state machine that owns it.

Place on the way: the source, on the training thread, before and after it waits for engines -> backend and engines, one
after the other. Nothing else moves memory, and each step waits for the one before:

    to the engines: the optimizers' state leaves; the engines' weights come; weights are published; the memory of the
        publish and, with `offloads_trainer`, the trainer's weights leave; the engines' cache comes
    to the trainer: the engines' cache and weights leave; everything of the trainer comes

So at any time at most the weights of both are there, and never a cache beside an optimizer's state. A change that fails
leaves the memory to nobody, and the run ends. An engine that dies does not fail a change: the others go on, and it is
started again when engines have the memory, never while the trainer has it.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

from spurline.errors import RunFailedError
from spurline.protocols.backend import Backend, YieldsDevice
from spurline_async_rl.engines.commands import ControlledEngine
from spurline_async_rl.source.loop_thread import GRACE_S, LoopThread, ends_the_run
from spurline_async_rl.source.publishing import Publisher
from spurline_rl.protocols.rollout_engine import TakesWeights
from spurline_rl.protocols.weight_sync import SyncReport

Owner = Literal["trainer", "engines", "nobody"]


class Colocation:
    """The owner of the devices' memory. All methods are called on the training thread.

    Each raises RunFailedError if memory does not change hands, or did not before. `engines_have` is the version of the
    weights that all engines hold, asleep or awake; None if it is unknown.
    """

    def __init__(
        self,
        engine: ControlledEngine,
        backend: YieldsDevice,
        publisher: Publisher,
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
        """Have engines generate with the backend's weights, which are of this version.

        Returns:
            The report of publishing them; None if engines had them already.
        """
        report: SyncReport | None = None
        with self._passing("trainer", "engines", "giving it to the engines"):
            # The optimizers' state goes first, to make room for the weights of both sides and a bucket.
            self._backend.yield_device(keep_weights=True)
            self._run(self._engine.wake("weights"), "Giving the engines the memory of their weights")
            if self.engines_have != version:
                report = self._publisher.publish(version, cast("Backend", self._backend))
                self.engines_have = version
            # Needed also where weights stay: only now is the memory free in which they were gathered.
            self._backend.yield_device(keep_weights=not self._offloads_trainer)
            self._run(self._engine.wake("cache"), "Giving the engines the memory of their cache")
        return report

    def take_back(self, *, keep_weights: bool) -> None:
        """Return when the trainer can train. With `keep_weights` engines keep theirs for their next turn."""
        # Adapters alone are published onto weights that nothing brings back.
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
        """Return the seconds of changes since the last call, as `time/to_engines` and `time/to_trainer`."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    @contextmanager
    def _passing(self, owner: Owner, to: Owner, what: str) -> Generator[None]:
        """Pass the memory on with the code inside. An error leaves it to nobody, for good."""
        if self._failure is not None:
            raise RunFailedError(
                f"The memory of the devices was lost to trainer and engines before {what}: {self._failure}"
            ) from self._failure
        assert self.owner == owner, f"{self.owner} owns the memory, not {owner}: {what}"
        self.owner = "nobody"
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise
        self.owner = to
        self._seconds["time/to_trainer" if to == "trainer" else "time/to_engines"] += time.perf_counter() - began

    def _run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        # Engines fall asleep only after a start that is under way.
        limit = self._engine.longest_start_s + GRACE_S
        with ends_the_run(what):
            self._loop.run(work, limit, what, every_s=self._watchdog_s)
