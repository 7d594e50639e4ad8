"""What became of the processes that agents' programs have started."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
from run_helpers import wait_for


def assert_gone(pids: Iterable[int]) -> None:
    """None of these processes runs any more, or soon will."""

    def gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    for pid in pids:
        wait_for(lambda pid=pid: gone(pid), f"the end of process {pid}", 30)
