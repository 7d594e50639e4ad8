"""A run is asked to stop after the step it is in: by SIGINT, SIGTERM or SIGHUP, or by a hook that gives a reason."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from spurline.terminal import write_nowhere

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        self._cuts_short = False

    def __bool__(self) -> bool:
        return self.signal is not None or self.reason is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # A run under `nohup` goes on when the terminal closes.
            caught = [number for number in _SIGNALS if number != signal.SIGHUP or not _is_ignored(number)]
            self._previous = {number: signal.signal(number, self._receive) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # The second SIGHUP of a terminal that closes may come when the run has just ended.
            again = number == signal.SIGHUP == self.signal
            signal.signal(number, signal.SIG_IGN if again else handler)
        self._previous = {}

    def cut_short(self, work: Callable[[], None]) -> None:
        """Call this unless a signal came before; the first one ends it at once, as nothing in it is worth finishing."""
        if self.signal is not None:
            return
        try:
            self._cuts_short = True
            work()
        except _CutShort:
            # What it waited for has been let go; the run goes on to its end.
            pass
        finally:
            self._cuts_short = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first = self.signal is None
        if number == signal.SIGHUP:
            # The shell and the kernel both send it when a terminal closes.
            _leave_closed_terminal()
        elif not is_first:
            raise KeyboardInterrupt(f"Interrupted by a second signal, {signal.Signals(number).name}.")
        self.signal = self.signal or signal.Signals(number)
        if number != signal.SIGHUP:
            self._acknowledge(number)
        if is_first and self._cuts_short:
            raise _CutShort

    def _acknowledge(self, number: int) -> None:
        again = "press Ctrl-C again to stop now" if number == signal.SIGINT else "a second signal stops it now"
        # On a terminal `^C` stands on the line. Not through sys.stderr, in whose own work this may have come.
        begin = "\n" if os.isatty(2) else ""
        # The run ends in order also when nobody reads its messages.
        with suppress(OSError):
            os.write(2, f"{begin}{self._words()}; {again}.\n".encode())


class _CutShort(KeyboardInterrupt):
    """The first signal, inside `cut_short`."""


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


def _leave_closed_terminal() -> None:
    """Discard output to a terminal that is gone: a failing write would also fail the step that is to be saved."""
    for output in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                write_nowhere(output)
