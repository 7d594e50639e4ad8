"""An event loop whose clock goes on by itself only: it jumps to the next timer when nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Clock(selectors.DefaultSelector):
    """Moves on where it would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for something outside"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 seconds. For code that waits for nothing but timers and its own tasks."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, however many seconds it sleeps."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
