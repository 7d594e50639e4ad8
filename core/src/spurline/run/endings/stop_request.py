"""Stop a run after its current step, when SIGINT, SIGTERM or SIGHUP arrives or a hook requests it."""

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
    """A request to end a run after its current step. It is truthy once it has a signal or a reason.

    It is a context manager that catches signals on the main thread.

    Args:
        words: Returns the first words of the message that is printed when a signal arrives.
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
            for number in _SIGNALS:
                # A run under `nohup` goes on when the terminal closes.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # A closing terminal sends SIGHUP twice. The second one may arrive after the run has ended.
            again = number == signal.SIGHUP == self.signal
            signal.signal(number, signal.SIG_IGN if again else handler)
        self._previous = {}

    def cut_short(self, work: Callable[[], None]) -> None:
        """Call `work`, unless a signal has arrived already. The first signal during `work` ends `work` at once."""
        if self.signal is not None:
            return
        try:
            self._cuts_short = True
            work()
        except _CutShort:
            pass
        finally:
            self._cuts_short = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first = self.signal is None
        if number == signal.SIGHUP:
            # When a terminal closes, the shell and the kernel both send SIGHUP. So two do not end the run at once.
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
        # A terminal has printed `^C` on this line. Avoid sys.stderr: the signal may have interrupted a write to it.
        begin = "\n" if os.isatty(2) else ""
        # The run must save even if the message cannot be written.
        with suppress(OSError):
            os.write(2, f"{begin}{self._words()}; {again}.\n".encode())


class _CutShort(KeyboardInterrupt):
    """Raised by the first signal inside `cut_short`."""


def _leave_closed_terminal() -> None:
    """Discard output to a terminal that is gone. Otherwise a failing write would end the run before it is saved."""
    for output in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                write_nowhere(output)
