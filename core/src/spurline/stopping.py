"""SIGINT and SIGTERM ask a run to stop after the step it is in; a second one stops it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set while a run is to end after its current step. Signals are caught only inside `with` on the main thread."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

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
