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
    mark_beginning(file)
    return file


def mark_beginning(file: int) -> None:
    """Write the line that marks the beginning of this process's output."""
    os.write(file, f"{_BEGIN}{os.getpid()} on {platform.node()} at {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())


def last_words(log: str, num_bytes: int = _LAST_WORDS_BYTES) -> str:
    """Return the end of the last process's output in this log."""
    if not Path(log).is_file():
        return ""
    with open(log, "rb") as file:
        return of_last_process(_end_of(file.fileno(), num_bytes))


def of_last_process(text: str) -> str:
    """Return the part of a log's end that the last process has written."""
    lines = text.splitlines()
    begin = max((number + 1 for number, line in enumerate(lines) if line.startswith(_BEGIN)), default=0)
    return "\n".join(line for line in lines[begin:] if not line.startswith(_RAYS_OWN)).strip()


def stacks_of(pid: int, limit_s: float) -> str:
    """Make a process write the stacks of its threads to its log. Return the stacks, or why there are none.

    The process must write standard error to its log file, and must have registered SIGUSR1 with `faulthandler`.
    """
    with suppress(OSError), open(f"/proc/{pid}/fd/2", "rb") as file:
        log = file.fileno()
        begin = size = os.fstat(log).st_size
        os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            time.sleep(_WRITING_S)
            before, size = size, os.fstat(log).st_size
            if size == before > begin:
                break
        if size > begin:
            return _end_of(log, min(_STACKS_BYTES, size - begin))
    return why_silent(pid)


def _end_of(log: int, num_bytes: int) -> str:
    start = max(0, os.fstat(log).st_size - num_bytes)
    return os.pread(log, num_bytes, start).decode(errors="replace").strip()
