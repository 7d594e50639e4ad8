"""A run is asked to stop after the step it is in: by SIGINT or SIGTERM, or by a hook that gives a reason."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set while a run is to end after its current step, by a signal or for a reason that was given.

    Signals are caught only inside `with` on the main thread.
    words: what the run does about it, as the beginning of a sentence; said as soon as a signal arrives.
    """

    def __init__(self, words: Callable[[], str]) -> None:
        self.signal: signal.Signals | None = None
        self.reason: str | None = None
        self._words = words
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None or self.reason is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt(f"second {signal.Signals(number).name}")
        self.signal = signal.Signals(number)
        again = "press Ctrl-C again to stop now" if number == signal.SIGINT else "a second signal stops it now"
        # On a terminal `^C` stands on the line. Not through sys.stderr, in whose own work this may have come.
        begin = "\n" if os.isatty(2) else ""
        # The run ends in order also when nobody reads its messages.
        with suppress(OSError):
            os.write(2, f"{begin}{self._words()}; {again}.\n".encode())
