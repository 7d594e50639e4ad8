"""What became of the processes that agents' programs have started."""

from __future__ import annotations

from collections.abc import Iterable

from living_processes import is_alive
from run_helpers import wait_for


def assert_gone(pids: Iterable[int]) -> None:
    """None of these processes runs any more, or soon will."""
    for pid in pids:
        wait_for(lambda pid=pid: not is_alive(pid), f"the end of process {pid}", 30)
