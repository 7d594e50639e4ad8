"""The process that runs once on each machine of a Ray cluster: it answers for the machine, and for its dead.

A rank that hangs or has died says nothing itself; this process reads what it wrote, lets it write its stacks, and sees
it gone. Imports no torch.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from spurline.files import own_file
from spurline_models.machine import num_cores, why_silent
from spurline_ranks.outcomes import Raised, Value, pack

_LAST_WORDS_BYTES = 3000
_STACKS_BYTES = 100_000
_WRITING_S = 0.2
"""Seconds after which a file that does not grow any more counts as written."""
_RAYS_TIME_S = 2.0
"""Seconds that Ray has for killing a rank by itself; what is killed otherwise it reports on the terminal."""
_BEGIN = "The output of process "
_RAYS_OWN = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes into a process's output for its own use begin so."""


def write_into(log: str) -> None:
    """Make this file, and its folder, the output of this process and of those that it will start."""
    file = begin_log(log)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def begin_log(log: str) -> int:
    """Open this file, and make its folder, for the output of this process or of those that it starts.

    What earlier processes wrote there stays; a line says where this one begins.
    """
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    file = own_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{_BEGIN}{os.getpid()} on {platform.node()} at {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
    return file


def last_words(log: str, num_bytes: int = _LAST_WORDS_BYTES) -> str:
    """Return the end of what the last process wrote that writes there."""
    lines = _end_of(Path(log), num_bytes).splitlines() if Path(log).is_file() else []
    begin = max((number + 1 for number, line in enumerate(lines) if line.startswith(_BEGIN)), default=0)
    return "\n".join(line for line in lines[begin:] if not line.startswith(_RAYS_OWN)).strip()


class NodeActor:
    """Every method is called through Ray."""

    def __init__(self) -> None:
        self._raylet = os.getppid()

    def missing(self, pids: Sequence[int]) -> list[int] | None:
        """Return those of these processes that are gone; None where Ray has ended on this machine, and so soon do all
        processes that it has started here."""
        return None if os.getppid() != self._raylet else [pid for pid in pids if not _is_there(pid)]

    def cores(self) -> int:
        """Return the number of CPU cores that processes may use here."""
        return num_cores()

    def run(self, function: str, arguments: tuple[Any, ...]) -> bytes:
        """Call `module:function`; returns the packed outcome."""
        try:
            return pack(Value(resolve_name(function)(*arguments)))
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            return pack(Raised.of(error))

    def last_words(self, log: str) -> str | None:
        """Return the end of what a rank wrote; None where Ray has ended on this machine."""
        return last_words(log) if os.getppid() == self._raylet else None

    def stacks(self, pid: int, log: str, limit_s: float) -> str:
        """Return the stack of each thread of a rank, or why it writes none; it does so to its log at SIGUSR1."""
        path = Path(log)
        begin = size = path.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + limit_s
        while time.monotonic() < until and (path.stat().st_size == begin or path.stat().st_size > size):
            size = path.stat().st_size
            time.sleep(_WRITING_S)
        return _end_of(path, min(_STACKS_BYTES, path.stat().st_size - begin)) or why_silent(pid)

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
