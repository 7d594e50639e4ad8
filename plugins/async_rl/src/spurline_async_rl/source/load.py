"""Measure what the event loop of the rollouts has to do, and how long things wait for it: metrics `controller/...`.

Every token of every response comes through this loop, so a loop that is busy all the time is what limits generation,
whatever engines can do. A callback that the loop calls again and again notes how late it comes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol

_EVERY_S = 0.02
"""Between two looks at the loop. They take 0.6 % of a core from a loop that has nothing else to do (120 microseconds
each, as it has to be woken up)."""
_SHORTEST_S = 1e-5
_RATIO = 1.1
_LONGEST_S = 1e5
_NUM_BUCKETS = 2 + math.ceil(math.log(_LONGEST_S / _SHORTEST_S, _RATIO))


class TimedLoop(Protocol):
    """What is asked of an event loop: see `asyncio.AbstractEventLoop`."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> asyncio.TimerHandle: ...


class Lags:
    """How long calls waited for the loop, in seconds, in memory of one size: counts by length, each bucket 10 % longer
    than the one before."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._total = 0
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        """A call waited so long; negative seconds count as 0."""
        place = 0
        if seconds > _SHORTEST_S:
            place = min(_NUM_BUCKETS - 1, 1 + int(math.log(seconds / _SHORTEST_S, _RATIO)))
        self._counts[place] += 1
        self._total += 1
        self.longest = max(self.longest, seconds)

    def quantile(self, share: float) -> float:
        """Seconds that this share of the calls waited at most, up to 10 % too high; 0 without any call."""
        wanted, seen = share * self._total, 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(self.longest, _SHORTEST_S * _RATIO**place)
        return 0.0


class LoopLoad:
    """The load of one event loop since it was last asked. All methods are called on that loop.

    tokens: how many have come through the loop so far. thread_time: CPU seconds of the thread that calls it.
    """

    def __init__(self, tokens: Callable[[], int], thread_time: Callable[[], float] = time.thread_time) -> None:
        self._num_tokens = tokens
        self._thread_time = thread_time
        self._loop: TimedLoop | None = None
        self._next: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self, loop: TimedLoop | None = None) -> None:
        """Begin to measure. loop: the running one where none is given."""
        self._loop = loop = loop or asyncio.get_running_loop()
        self._begin_anew(loop)
        self._look_later(loop)

    def take(self) -> dict[str, float]:
        """The metrics since `start` or the last call.

        `controller/lag_p50`, `_p99` and `_max`: seconds that a call which comes at any time waits for the loop.
        `controller/cpu_share`: CPU time of the loop's thread per second, 1 for a whole core.
        `controller/tokens_per_s`: tokens of answered requests.
        """
        loop = self._loop
        assert loop is not None, "not started"
        if loop.time() > self._due:
            # What blocked the loop until a moment ago belongs to these seconds, though its own callback is yet to come.
            self.stop()
            self._look(loop)
        seconds = max(1e-9, loop.time() - self._began)
        found = {
            "controller/lag_p50": self._lags.quantile(0.5),
            "controller/lag_p99": self._lags.quantile(0.99),
            "controller/lag_max": self._lags.longest,
            "controller/cpu_share": (self._thread_time() - self._cpu_s) / seconds,
            "controller/tokens_per_s": (self._num_tokens() - self._tokens) / seconds,
        }
        self._begin_anew(loop)
        return found

    def stop(self) -> None:
        """Leave the loop alone."""
        if self._next is not None:
            self._next.cancel()

    def _begin_anew(self, loop: TimedLoop) -> None:
        self._began, self._cpu_s, self._tokens = loop.time(), self._thread_time(), self._num_tokens()
        self._lags = Lags()

    def _look_later(self, loop: TimedLoop) -> None:
        self._due = loop.time() + _EVERY_S
        self._next = loop.call_at(self._due, lambda: self._look(loop))

    def _look(self, loop: TimedLoop) -> None:
        late = loop.time() - self._due
        self._lags.add(late)
        # Calls that came while the loop was blocked waited for the rest of it: one look for them all would make a
        # block of seconds a single call among thousands.
        for missed in range(1, math.ceil(late / _EVERY_S)):
            self._lags.add(late - missed * _EVERY_S)
        self._look_later(loop)
