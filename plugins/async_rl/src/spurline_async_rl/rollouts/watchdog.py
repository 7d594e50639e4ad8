"""Wait for rollouts, and say who holds what when nothing moves for too long."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from spurline.errors import RunFailedError
from spurline_async_rl.rollouts.loop_thread import LoopThread

T = TypeVar("T")


class Watchdog:
    """Of one wait of the training thread. `source.watchdog_s` after the last movement it prints to stderr what holds
    the run up, again and again, and after `source.stall_timeout_s` it ends the run.

    describe: from seconds without movement, what is under way. moved_at: when a request was last answered, on the
    monotonic clock; what has not ended yet may move all the same.
    """

    def __init__(
        self,
        watchdog_s: float,
        stall_timeout_s: float,
        loop: LoopThread,
        describe: Callable[[float], str],
        moved_at: Callable[[], float],
    ) -> None:
        self._watchdog_s = watchdog_s
        self._stall_timeout_s = stall_timeout_s
        self._loop = loop
        self._describe = describe
        self._last_answer = moved_at
        self._moved_at = self._told_at = time.monotonic()

    def wait(self, changed: threading.Event) -> None:
        """Return when something changed, or after having told that nothing did."""
        if changed.wait(self._patience()):
            self._moved_at = self._told_at = time.monotonic()
        elif (answered_at := self._last_answer()) > self._moved_at:
            self._moved_at = self._told_at = answered_at
        else:
            self._tell(self._describe)

    def result(self, future: concurrent.futures.Future[T]) -> T:
        """The result of a call on the event loop, which takes long only when the loop is blocked."""
        while True:
            try:
                return future.result(self._patience())
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                self._tell(self._blocked)

    def _patience(self) -> float:
        return max(0.0, self._watchdog_s - (time.monotonic() - self._told_at))

    def _tell(self, describe: Callable[[float], str]) -> None:
        self._told_at = time.monotonic()
        waited_s = self._told_at - self._moved_at
        text = describe(waited_s)
        if waited_s >= self._stall_timeout_s:
            raise RunFailedError(
                f"{text}\nThe run ends, as source.stall_timeout_s is {self._stall_timeout_s:g}. The same command goes "
                "on from the last checkpoint, which holds the groups that were finished by then."
            )
        tell(text)

    def _blocked(self, waited_s: float) -> str:
        return (
            f"Nothing moves for {waited_s:.0f} s, and training waits for rollouts: an environment or reward blocks "
            "the event loop they all run on. Move what takes long into spurline.rl.thread_calls.in_thread.\n"
            f"{self._loop.position()}"
        )


def tell(text: str) -> None:
    """Print what holds a run up."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
