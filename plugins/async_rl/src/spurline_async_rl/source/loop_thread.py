"""Run an event loop on its own thread, and keep the garbage collector from blocking the loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from spurline.errors import RunFailedError, SpurlineError
from spurline.terminal import tell

T = TypeVar("T")

GRACE_S = 60.0
"""Seconds by which an outer time limit is longer than an inner limit, because the inner limit's error says more."""
_THRESHOLDS = 4_000, 5, 1_000_000
"""Thresholds of the garbage collector with which Python practically never starts a full collection by itself."""
_MANY_ATTEMPTS = 2048
"""With this many attempts, Python's automatic full collections would stop the loop for too long."""
_STEPS_PER_COLLECTION = 100


@contextmanager
def ends_the_run(what: str) -> Generator[None]:
    """Turn an unexpected error in this context into a RunFailedError."""
    try:
        yield
    except SpurlineError:
        raise
    except Exception as error:
        raise RunFailedError(
            f"{what} failed: {type(error).__name__}: {error}. Nothing was trained afterwards. The same command resumes "
            "the run from its last checkpoint."
        ) from error


class LoopThread:
    """A thread with an event loop. The first use starts the thread. All methods are called from other threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Run the coroutine and return its result, with the time limit of `wait`."""
        return self.wait(self.start(coroutine), timeout_s, what)

    def wait(
        self,
        future: concurrent.futures.Future[T],
        timeout_s: float,
        what: str,
        *,
        every_s: float | None = None,
        waits_for: Callable[[], str] | None = None,
    ) -> T:
        """Return the result of a future of `start`. Print a message every `every_s` seconds until then.

        Raises:
            RunFailedError: If the future takes longer than `timeout_s`. The future is then cancelled.
        """
        began = time.monotonic()
        try:
            while True:
                left = timeout_s - (time.monotonic() - began)
                try:
                    return future.result(left if every_s is None else min(left, every_s))
                except concurrent.futures.TimeoutError:
                    passed = time.monotonic() - began
                    if future.done():
                        raise
                    if passed >= timeout_s:
                        place = self.position()
                        raise RunFailedError(f"{what} did not end within {timeout_s:g} s.\n{place}") from None
                    reason = "" if waits_for is None else f"; it waits for {waits_for()}"
                    tell(f"{what} has taken {passed:.0f} s so far{reason}.")
        finally:
            # After an error or Ctrl-C, the work must not go on.
            future.cancel()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the coroutine, and return the future of its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started())

    def submit(self, function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
        """Start a function on the loop, and return the future of its result."""

        async def calling() -> T:
            return function(*arguments)

        return self.start(calling())

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function on the loop, and return its result. Raises RunFailedError if this takes 120 s."""
        name = getattr(function, "__name__", "a call")
        return self.wait(self.submit(function, *arguments), 120.0, f"The event loop of the rollouts is blocked: {name}")

    def responds(self, timeout_s: float) -> bool:
        """Return whether the loop answers in time. If not, a task blocks it."""
        if self._loop is None:
            return True
        try:
            self.submit(bool).result(timeout_s)
        except concurrent.futures.TimeoutError:
            return False
        return True

    def position(self) -> str:
        """Return the current stack of the loop's thread as text."""
        assert self._thread is not None, "not started"
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return f"Thread {self._name} has ended."
        return f"Thread {self._name} is at:\n{''.join(traceback.format_stack(frame)[-8:])}".rstrip()

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel all tasks, and end the loop."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RunFailedError(f"The event loop of the rollouts did not end in {timeout_s:g} s.\n{self.position()}")
        self._loop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            ready: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()

            def live() -> None:
                with asyncio.Runner() as runner:
                    ready.set_result(runner.get_loop())
                    runner.get_loop().run_forever()

            # A daemon thread cannot keep a failed run alive, even if some code blocks the loop.
            self._thread = threading.Thread(target=live, name=self._name, daemon=True)
            self._thread.start()
            self._loop = ready.result(30.0)
        return self._loop


class QuietCollector:
    """Keeps full garbage collections from stopping the event loop, from `start` to `close`.

    A full collection stops all threads, and takes more than a second with 65,536 running attempts. So objects that
    exist when a run starts, such as imported modules, are never examined (`gc.freeze`). With many attempts, full
    collections run only between steps, every 100 steps.
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
        """Run a full collection if one is due. This is called between two steps."""
        self._steps += 1
        if self._before is not None and self._is_rare and self._steps % _STEPS_PER_COLLECTION == 0:
            gc.collect()

    def close(self) -> None:
        """Restore the collector's settings. A second call has no effect."""
        if self._before is not None:
            gc.set_threshold(*self._before)
            gc.unfreeze()
            self._before = None
