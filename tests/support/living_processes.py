"""Processes that may end while a test looks at them. psutil knows no command line of a zombie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from run_helpers import wait_for

if TYPE_CHECKING:
    import psutil


def living_below(pid: int, part: str) -> list[psutil.Process]:
    """The descendants of this process that live and have `part` in their command line."""
    import psutil

    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in family if part in _command(process)]


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    # Tests of core alone have no psutil.
    if Path("/proc/self/stat").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    import psutil

    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def assert_all_gone(pids: Sequence[int], within_s: float = 5.0) -> None:
    """Wait until none of these processes is left, not even as a zombie."""
    import psutil

    wait_for(lambda: not any(map(psutil.pid_exists, pids)), "the end of processes", within_s)
