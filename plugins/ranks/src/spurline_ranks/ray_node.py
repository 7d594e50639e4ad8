"""The process that runs once on each machine of a Ray cluster: it answers for the machine, and for its dead.

Imports no torch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

from spurline_ranks.logs import last_words, stacks_of
from spurline_ranks.outcomes import Raised, Value, pack

_RAYS_TIME_S = 2.0
"""Seconds that Ray has for killing a rank by itself: Ray reports a rank that is killed otherwise on the terminal."""


class NodeActor:
    """Every method is called through Ray."""

    def __init__(self) -> None:
        self._raylet = os.getppid()

    def missing(self, pids: Sequence[int]) -> list[int] | None:
        """Return those of these processes that are gone; None if Ray has ended here, which ends all of them soon."""
        return None if os.getppid() != self._raylet else [pid for pid in pids if not _is_there(pid)]

    def run(self, function: str, arguments: tuple[Any, ...]) -> bytes:
        """Call `module:function`; returns the packed outcome."""
        try:
            return pack(Value(resolve_name(function)(*arguments)))
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            return pack(Raised.of(error))

    def last_words(self, log: str) -> str | None:
        """Return the end of what a rank wrote; None if Ray has ended on this machine."""
        return last_words(log) if os.getppid() == self._raylet else None

    def stacks(self, pid: int, log: str, limit_s: float) -> str:
        """Return the stack of each thread of a rank; see `stacks_of`."""
        with open(log, "rb") as file:
            return stacks_of(pid, file.fileno(), limit_s)

    def end(self, pids: Sequence[int], limit_s: float) -> list[int]:
        """See these ranks end, which Ray has killed; returns those that are still there when the time is over.

        Ray gives each a group of its own, but does not kill what else is in it, nor a rank that is stopped.
        """
        left = _left(pids, _RAYS_TIME_S)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return left and _left(left, limit_s)


def _left(pids: Sequence[int], limit_s: float) -> list[int]:
    """Wait for their end; returns those that are still there when the time is over."""
    until = time.monotonic() + limit_s
    while (left := [pid for pid in pids if _is_there(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
