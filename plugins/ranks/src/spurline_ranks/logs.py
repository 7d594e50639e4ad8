"""Write the logs of processes, and read the end of a log and the stacks of a process that hangs."""

from __future__ import annotations

import os
import platform
import signal
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from spurline.files import own_file
from spurline_models.machine import why_silent

_LAST_WORDS_BYTES = 3000
_STACKS_BYTES = 100_000
_WRITING_S = 0.3
"""A process is assumed to have finished writing when its file has not grown for this many seconds."""
_BEGIN = "The output of process "
_RAYS_OWN = (":job_id:", ":actor_name:", ":task_name:")
"""Beginnings of the lines that Ray writes into the output of a process."""


def write_into(log: str) -> None:
    """Redirect the output of this process, and of its later children, to this file. See `begin_log`."""
    file = begin_log(log)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def begin_log(log: str) -> int:
    """Open this file for the output of a process, and return the file descriptor. Missing folders are made.

    Earlier output stays in the file. A line marks the beginning of the new output.
    """
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    file = own_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{_BEGIN}{os.getpid()} on {platform.node()} at {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
    return file


def last_words(log: str | int, num_bytes: int = _LAST_WORDS_BYTES) -> str:
    """Return the end of the last process's output in this log. `log` is a path or an open file."""
    if isinstance(log, str):
        if not Path(log).is_file():
            return ""
        with open(log, "rb") as file:
            return last_words(file.fileno(), num_bytes)
    lines = _end_of(log, num_bytes).splitlines()
    begin = max((number + 1 for number, line in enumerate(lines) if line.startswith(_BEGIN)), default=0)
    return "\n".join(line for line in lines[begin:] if not line.startswith(_RAYS_OWN)).strip()


def stacks_of(pid: int, log: int, limit_s: float) -> str:
    """Make a process write the stacks of its threads into its open log. Return the stacks, or why there are none."""
    begin = size = os.fstat(log).st_size
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        time.sleep(_WRITING_S)
        before, size = size, os.fstat(log).st_size
        if size == before > begin:
            break
    return _end_of(log, min(_STACKS_BYTES, size - begin)) or why_silent(pid)


def _end_of(log: int, num_bytes: int) -> str:
    start = max(0, os.fstat(log).st_size - num_bytes)
    return os.pread(log, num_bytes, start).decode(errors="replace").strip()
