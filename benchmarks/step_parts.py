"""Measure the time in functions of Spurline, by replacing them with wrappers. `rl_overhead.py` uses this module.

Spans may contain other spans, so their users subtract. Functions that run beside another thread are measured by the
time of their own thread, so that no time is counted twice.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]


@dataclass(frozen=True)
class Seconds:
    """Seconds of wall time, and of processor time of the process or of one thread."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls, *, of_thread: bool = False) -> Seconds:
        return cls(time.perf_counter(), time.thread_time() if of_thread else time.process_time())

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


class StepParts:
    """Adds up the time of wrapped functions.

    Attributes:
        taken: The time of each part by name. It has all parts with wrapped functions.
        is_fine: Whether `busy` measures. Its clocks take a few microseconds for each of several calls in an attempt, so
            they are off when a whole step is measured.
    """

    def __init__(self) -> None:
        self.taken: dict[str, Seconds] = {}
        self.is_fine = True

    def clear(self) -> None:
        self.taken = dict.fromkeys(self.taken, Seconds())

    def call(self, name: str, *, of_thread: bool = False) -> Wrapper:
        """Return a wrapper that measures calls of a plain function."""
        self.taken[name] = Seconds()

        def wrap(function: Function) -> Function:
            @functools.wraps(function)
            def timed(*arguments: Any, **keywords: Any) -> Any:
                with self._clock(name, of_thread):
                    return function(*arguments, **keywords)

            return timed

        return wrap

    def until_done(self, name: str) -> Wrapper:
        """Return a wrapper that measures calls of an async function from beginning to end, including waits."""
        self.taken[name] = Seconds()

        def wrap(function: Function) -> Function:
            @functools.wraps(function)
            async def timed(*arguments: Any, **keywords: Any) -> Any:
                with self._clock(name, of_thread=False):
                    return await function(*arguments, **keywords)

            return timed

        return wrap

    def busy(self, name: str) -> Wrapper:
        """Return a wrapper that measures calls of an async function without its waits."""
        self.taken[name] = Seconds()

        def wrap(function: Function) -> Function:
            @functools.wraps(function)
            async def timed(*arguments: Any, **keywords: Any) -> Any:
                if not self.is_fine:
                    return await function(*arguments, **keywords)
                return await _Busy(function(*arguments, **keywords), lambda: self._clock(name, of_thread=True))

            return timed

        return wrap

    @contextmanager
    def _clock(self, name: str, of_thread: bool) -> Generator[None]:
        begin = Seconds.now(of_thread=of_thread)
        try:
            yield
        finally:
            self.taken[name] += Seconds.now(of_thread=of_thread) - begin


class _Busy:
    """An awaitable that runs another awaitable, and measures only while that one uses the event loop."""

    def __init__(self, awaitable: Awaitable[Any], clock: Callable[[], Any]) -> None:
        self._awaitable = awaitable
        self._clock = clock

    def __await__(self) -> Iterator[Any]:
        steps: Any = self._awaitable.__await__()
        resume: Callable[[], Any] = functools.partial(steps.send, None)
        while True:
            # A context manager would take StopIteration for its own, so it must not get it.
            result: Any = None
            ended = False
            with self._clock():
                try:
                    waited = resume()
                except StopIteration as stop:
                    ended, result = True, stop.value
            if ended:
                return result
            try:
                resume = functools.partial(steps.send, (yield waited))
            except BaseException as error:  # noqa: BLE001 - the awaitable must also see cancellation
                resume = functools.partial(steps.throw, error)


@contextmanager
def patched() -> Iterator[Callable[[Any, str, Wrapper], None]]:
    """Yield a function that wraps attributes of classes or modules until the context ends."""
    with ExitStack() as stack:

        def patch(owner: Any, name: str, wrap: Wrapper) -> None:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))

        yield patch
