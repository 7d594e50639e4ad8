"""Let one process carry tens of thousands of attempts, and measure how busy its event loop is (`controller/...`).

Every token of every response comes through this loop, so a loop that is always busy limits generation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

_THRESHOLDS = 4_000, 5, 1_000_000
"""Thresholds of the garbage collector with many attempts under way: it does not visit old objects by itself."""
_MANY_ATTEMPTS = 2048
"""Attempts under way from which on Python's own full collections would stop the loop for long."""
_STEPS_PER_COLLECTION = 100


class QuietCollector:
    """Keeps full garbage collections from stopping the event loop, from `start` to `close`.

    They visit every object while all threads stand still, which takes more than a second for 65,536 attempts under way.
    Objects that exist when a run starts, such as imported modules, are frozen. With many attempts old objects are
    visited between two steps only, every hundredth time. Where the collector is off nothing is changed.
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
        """Collect everything if it is time to. Called between two steps."""
        self._steps += 1
        if self._before is not None and self._is_rare and self._steps % _STEPS_PER_COLLECTION == 0:
            gc.collect()

    def close(self) -> None:
        """Leave the collector as it was. May be called again."""
        if self._before is not None:
            gc.set_threshold(*self._before)
            gc.unfreeze()
            self._before = None


class LoopLoad:
    """The load of one event loop. Its methods are called on that loop; `tokens` counts those that came through it."""

    def __init__(self, tokens: Callable[[], int]) -> None:
        self._num_tokens = tokens

    def start(self) -> None:
        """Begin to measure."""
        self._began, self._cpu_s, self._tokens = time.perf_counter(), time.thread_time(), self._num_tokens()

    def take(self) -> dict[str, float]:
        """Return the metrics since `start` or the last call.

        `controller/cpu_share` is the CPU time of the loop's thread per second, 1 for a whole core.
        `controller/tokens_per_s` counts tokens of answered requests.
        """
        began, cpu_s, tokens = self._began, self._cpu_s, self._tokens
        self.start()
        seconds = max(1e-9, self._began - began)
        return {
            "controller/cpu_share": (self._cpu_s - cpu_s) / seconds,
            "controller/tokens_per_s": (self._tokens - tokens) / seconds,
        }
