"""The processes of one vLLM engine: notice their end, and end them.

Place on the way: AsyncEngine hands over their ids -> this.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence

import psutil


class EngineProcesses:
    """main: ids of the engine's own processes; what these have started belongs to it too."""

    def __init__(self, main: Sequence[int]):
        self._main = [psutil.Process(pid) for pid in main]
        # By handle, not by id, which another process could have by the time they are killed.
        self._all = [*self._main, *(child for process in self._main for child in process.children(recursive=True))]

    @property
    def pids(self) -> list[int]:
        """Of all of them."""
        return [process.pid for process in self._all]

    def __str__(self) -> str:
        return f"process {self._main[0].pid}"

    async def wait_ended(self) -> str:
        """Return as soon as one of them has ended: an engine works with all of them or not at all."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        watched: list[int] = []
        try:
            for process in self._all:
                try:
                    descriptor = os.pidfd_open(process.pid)
                except ProcessLookupError:
                    return f"process {process.pid} has ended"
                watched.append(descriptor)
                loop.add_reader(descriptor, _note, ended, process.pid)
            return f"process {await ended} has ended"
        finally:
            for descriptor in watched:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    def kill(self) -> None:
        """End what still runs, by force."""
        for process in self._all:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._all, timeout=10)


def _note(ended: asyncio.Future[int], pid: int) -> None:
    if not ended.done():
        ended.set_result(pid)
