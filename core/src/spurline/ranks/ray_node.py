"""What runs once on each machine of a Ray cluster where ranks are: it answers for the machine, and for its dead.

A rank that hangs or has died says nothing itself; this process reads what it wrote, lets it write its stacks, and sees
it gone. Imports no torch.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from spurline.ranks.machine import num_cores
from spurline.ranks.outcomes import Outcome, Raised, Value

_LAST_WORDS_BYTES = 3000
_STACKS_BYTES = 100_000
_WRITING_S = 0.2
"""Seconds after which a file that does not grow any more counts as written."""
_RAYS_OWN = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes into a process's output for its own use begin so."""


class NodeActor:
    """Every method is called through Ray."""

    def cores(self) -> int:
        """CPU cores that processes may use here."""
        return num_cores()

    def run(self, function: str, arguments: tuple[Any, ...]) -> bytes:
        """The pickled Outcome of `module:function`."""
        try:
            outcome: Outcome = Value(resolve_name(function)(*arguments))
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            outcome = Raised.of(error)
        return pickle.dumps(outcome)

    def last_words(self, log: str) -> str:
        """The end of what a rank wrote."""
        lines = _end_of(Path(log), _LAST_WORDS_BYTES).splitlines()
        return "\n".join(line for line in lines if not line.startswith(_RAYS_OWN)).strip()

    def stacks(self, pid: int, log: str, limit_s: float) -> str:
        """Where each thread of a rank stands; the rank writes that to its log when it is sent SIGUSR1."""
        path = Path(log)
        begin = size = path.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + limit_s
        while time.monotonic() < until and (path.stat().st_size == begin or path.stat().st_size > size):
            size = path.stat().st_size
            time.sleep(_WRITING_S)
        return _end_of(path, min(_STACKS_BYTES, path.stat().st_size - begin))

    def left_of(self, pids: Sequence[int], limit_s: float) -> list[int]:
        """Those of these processes that are still there when all should be gone; returns as soon as all are."""
        until = time.monotonic() + limit_s
        while (left := [pid for pid in pids if _is_there(pid)]) and time.monotonic() < until:
            time.sleep(0.02)
        return left


def _end_of(path: Path, size: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace").strip()


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
