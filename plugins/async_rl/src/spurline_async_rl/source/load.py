"""Let one process carry tens of thousands of attempts, and measure how busy its event loop is (`controller/...`).

Every token of every response comes through this loop, so a loop that is busy all the time limits generation whatever
engines can do.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Protocol

_EVERY_S = 0.02
"""Seconds between two looks at the loop. They take 0.6 % of a core."""
_THRESHOLDS = 4_000, 5, 1_000_000
"""Thresholds of the garbage collector with many attempts under way: old objects are not visited on their own."""
_MANY_ATTEMPTS = 2048
"""Attempts under way from which on Python's own full collections would stop the loop for long."""
_STEPS_PER_COLLECTION = 100


class QuietCollector:
    """Keeps full garbage collections from stopping the event loop, from `start` to `close`.

    They visit every object while all threads stand still, which takes more than a second for 65,536 attempts under way.
    What is there when a run starts, such as imported modules, is frozen. With many attempts old objects are visited
    between two steps only, every hundredth time. Where the collector is off nothing is changed.
    """

    def __init__(self, attempts: int) -> None:
        self._is_rare = attempts >= _MANY_ATTEMPTS
        self._before: tuple[int, int, int] | None = None
        self._steps = 0

    def start(self) -> None:
        if self._before is not None or not gc.isenabled():
            return
        self._before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        if self._is_rare:
            gc.set_threshold(*_THRESHOLDS)

    def step(self) -> None:
        """Collect everything when it is time to. Called between two steps."""
        self._steps += 1
        if self._before is not None and self._is_rare and self._steps % _STEPS_PER_COLLECTION == 0:
            gc.collect()

    def close(self) -> None:
        """Leave the collector as it was. May be called again."""
        if self._before is not None:
            gc.set_threshold(*self._before)
            gc.unfreeze()
            self._before = None


class TimedLoop(Protocol):
    """The part of `asyncio.AbstractEventLoop` that is used here."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> asyncio.TimerHandle: ...


class LoopLoad:
    """The load of one event loop since it was last asked. All methods are called on that loop.

    tokens: returns how many have come through the loop so far. thread_time: CPU seconds of the calling thread.
    """

    def __init__(self, tokens: Callable[[], int], thread_time: Callable[[], float] = time.thread_time) -> None:
        self._num_tokens = tokens
        self._thread_time = thread_time
        self._loop: TimedLoop | None = None
        self._next: asyncio.TimerHandle | None = None
        self._due = self._longest = 0.0

    def start(self, loop: TimedLoop | None = None) -> None:
        """Begin to measure the loop, by default the running one."""
        self._loop = loop = loop or asyncio.get_running_loop()
        self._began, self._cpu_s, self._tokens = loop.time(), self._thread_time(), self._num_tokens()
        self._look_later(loop)

    def take(self) -> dict[str, float]:
        """Return the metrics since `start` or the last call.

        `controller/lag_max`: the most seconds that a call waited for the loop. `controller/cpu_share`: CPU time of the
        loop's thread per second, 1 for a whole core. `controller/tokens_per_s`: tokens of answered requests.
        """
        loop = self._loop
        assert loop is not None, "not started"
        # What blocked the loop until a moment ago belongs to these seconds, though its own callback is yet to come.
        self._look(loop)
        seconds = max(1e-9, loop.time() - self._began)
        found = {
            "controller/lag_max": self._longest,
            "controller/cpu_share": (self._thread_time() - self._cpu_s) / seconds,
            "controller/tokens_per_s": (self._num_tokens() - self._tokens) / seconds,
        }
        self._began, self._cpu_s, self._tokens = loop.time(), self._thread_time(), self._num_tokens()
        self._longest = 0.0
        return found

    def stop(self) -> None:
        """Leave the loop alone."""
        if self._next is not None:
            self._next.cancel()

    def _look_later(self, loop: TimedLoop) -> None:
        self._due = loop.time() + _EVERY_S
        self._next = loop.call_at(self._due, lambda: self._look(loop))

    def _look(self, loop: TimedLoop) -> None:
        self._longest = max(self._longest, loop.time() - self._due)
        self.stop()
        self._look_later(loop)
