"""Processes that may end while a test looks at them: of one that nobody has waited for yet, psutil tells no command."""

from __future__ import annotations

import psutil


def living_below(pid: int, part: str) -> list[psutil.Process]:
    """The descendants of this process that live and have `part` in their command line."""
    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in family if part in _command(process)]


def is_alive(pid: int) -> bool:
    """Whether it has not ended, waited for or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
