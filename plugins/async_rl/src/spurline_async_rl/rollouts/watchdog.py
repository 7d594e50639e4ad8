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

    describe: from seconds without movement and the step, what is under way.
    """

    def __init__(
        self, watchdog_s: float, stall_timeout_s: float, loop: LoopThread, describe: Callable[[float, int], str]
    ) -> None:
        self._watchdog_s = watchdog_s
        self._stall_timeout_s = stall_timeout_s
        self._loop = loop
        self._describe = describe
        self._moved_at = self._told_at = time.monotonic()

    def wait(self, changed: threading.Event, step: int) -> None:
        """Return when something changed, or after having told that nothing did."""
        if changed.wait(self._patience()):
            self._moved()
        else:
            self._tell(self._describe, step)

    def result(self, future: concurrent.futures.Future[T], step: int) -> T:
        """The result of a call on the event loop, which takes long only when the loop is blocked."""
        while True:
            try:
                return future.result(self._patience())
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                self._tell(self._blocked, step)

    def _patience(self) -> float:
        return max(0.0, self._watchdog_s - (time.monotonic() - self._told_at))

    def _moved(self) -> None:
        self._moved_at = self._told_at = time.monotonic()

    def _tell(self, describe: Callable[[float, int], str], step: int) -> None:
        self._told_at = time.monotonic()
        waited_s = self._told_at - self._moved_at
        text = describe(waited_s, step)
        if waited_s >= self._stall_timeout_s:
            raise RunFailedError(
                f"{text}\nThe run ends, as source.stall_timeout_s is {self._stall_timeout_s:g}. The same command goes "
                "on from the last checkpoint, which holds the groups that were finished by then."
            )
        tell(text)

    def _blocked(self, waited_s: float, step: int) -> str:
        return (
            f"Nothing moves for {waited_s:.0f} s, and step {step} waits for rollouts: an environment or reward blocks "
            "the event loop they all run on. Move what takes long into spurline.rl.thread_calls.in_thread.\n"
            f"{self._loop.position()}"
        )


def tell(text: str) -> None:
    """Print what holds a run up."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
