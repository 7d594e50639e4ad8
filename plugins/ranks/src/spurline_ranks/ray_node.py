"""A process on each machine of a Ray cluster, which answers questions about the machine's ranks. Imports no torch."""

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
"""Seconds to wait for Ray to kill a rank first. If this actor kills the rank, Ray prints a report."""


class NodeActor:
    """The actor of one machine. Its methods are called through Ray."""

    def __init__(self) -> None:
        self._raylet = os.getppid()

    def missing(self, pids: Sequence[int]) -> list[int] | None:
        """Return the given processes that have ended, or None if Ray has ended on this machine."""
        return None if os.getppid() != self._raylet else [pid for pid in pids if not _is_there(pid)]

    def run(self, function: str, arguments: tuple[Any, ...]) -> bytes:
        """Call `module:function`, and return the packed outcome."""
        try:
            return pack(Value(resolve_name(function)(*arguments)))
        except Exception as error:  # noqa: BLE001 - raised where it was asked
            return pack(Raised.of(error))

    def last_words(self, log: str) -> str | None:
        """Return the end of a rank's output, or None if Ray has ended on this machine."""
        return last_words(log) if os.getppid() == self._raylet else None

    def stacks(self, pid: int, log: str, limit_s: float) -> str:
        """Return the stack of each thread of a rank. See `stacks_of`."""
        with open(log, "rb") as file:
            return stacks_of(pid, file.fileno(), limit_s)

    def end(self, pids: Sequence[int], limit_s: float) -> list[int]:
        """Wait until ranks that Ray has killed have ended. Return the ranks that have not ended within the limit.

        This also kills processes that Ray does not kill: stopped ranks, and other processes of a rank's group.
        """
        left = _left(pids, _RAYS_TIME_S)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return left and _left(left, limit_s)


def _left(pids: Sequence[int], limit_s: float) -> list[int]:
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
