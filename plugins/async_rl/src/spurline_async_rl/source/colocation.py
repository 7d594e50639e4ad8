"""Pass device memory back and forth between the trainer and colocated engines.

The engines get the memory in these steps, one after the other:
1. The trainer frees the optimizer's state.
2. The engines load their weights, and the new weights are published.
3. The trainer frees the memory that the publish used, and with `offloads_trainer` also its weights.
4. The engines allocate their cache.
The trainer gets the memory back when the engines have freed their cache and weights. So the cache and the optimizer's
state are never on a device at the same time.

If a step fails, the run ends. If an engine dies, the other engines continue, and the dead engine is started again when
the engines have the memory.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

from spurline.errors import RunFailedError
from spurline.protocols.backend import Backend
from spurline_async_rl.engines.commands import ControlledEngine
from spurline_async_rl.source.loop_thread import GRACE_S, LoopThread, ends_the_run
from spurline_async_rl.source.publishing import Publisher
from spurline_models.abilities import YieldsDevice
from spurline_rl.protocols.rollout_engine import TakesWeights
from spurline_rl.protocols.weight_sync import SyncReport


class Colocation:
    """Passes the memory, and knows which weights the engines have. All methods are called on the training thread.

    After a call has failed, later calls raise RunFailedError. `engines_have` is the version of the weights in all
    engines, or None if it is unknown.
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
        """Start the engines, and send them to sleep."""
        with self._passing("engines", "starting the engines"):
            self._backend.yield_device(keep_weights=not self._offloads_trainer)
            self._publisher.start_engines()
        self.take_back(keep_weights=False)

    def give(self, version: int) -> SyncReport | None:
        """Give the memory to the engines, which then generate with the backend's weights of version `version`.

        Returns:
            The report of the publish, or None if the engines had these weights already.
        """
        report: SyncReport | None = None
        with self._passing("engines", "giving it to the engines"):
            self._backend.yield_device(keep_weights=True)
            self._run(self._engine.wake("weights"), "Giving the engines the memory for their weights")
            if self.engines_have != version:
                report = self._publisher.publish(version, cast("Backend", self._backend))
                self.engines_have = version
            # This also frees the memory of the publish.
            self._backend.yield_device(keep_weights=not self._offloads_trainer)
            self._run(self._engine.wake("cache"), "Giving the engines the memory for their cache")
        return report

    def take_back(self, *, keep_weights: bool) -> None:
        """Give the memory to the trainer. With `keep_weights`, the engines keep their weights in host memory."""
        # If only adapters are published, engines keep their weights, because no publish sends the base weights again.
        keeps = keep_weights or self._engine.takes_adapters
        with self._passing("trainer", "giving it back to the trainer"):
            if not keeps:
                self.engines_have = None
            self._run(self._engine.sleep(keep_weights=keeps), "Sending the engines to sleep")
            self._backend.take_device()

    def serve(self, version: int, engines: Sequence[TakesWeights]) -> None:
        """Publish the weights of this version, in the engines' turn, to `engines`, which were started again."""
        if not self._offloads_trainer:
            with self._passing("engines", "publishing to an engine that was started again"):
                self._publisher.publish(version, cast("Backend", self._backend), engines)
                self._backend.yield_device(keep_weights=True)
            return
        # The trainer's weights must come back first, and they fit only while the engines sleep.
        self.take_back(keep_weights=True)
        self.engines_have = None
        self.give(version)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds spent on passing the memory since the last call, as metrics."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    @contextmanager
    def _passing(self, to: Literal["trainer", "engines"], what: str) -> Generator[None]:
        """Time the code in this context, which passes the memory. After an error, all later calls fail too."""
        if self._failure is not None:
            raise RunFailedError(
                f"Passing the memory of the devices failed earlier, before {what}: {self._failure}"
            ) from self._failure
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise
        self._seconds[f"time/to_{to}"] += time.perf_counter() - began

    def _run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        # An engine that is starting can sleep only after its start.
        limit = self._engine.longest_start_s + GRACE_S
        with ends_the_run(what):
            self._loop.wait(self._loop.start(work), limit, what, every_s=self._watchdog_s)
