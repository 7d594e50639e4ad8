"""Start vLLM's AsyncLLM, or give up on the way; notice the end of its processes, and end them.

Place on the way: EngineSpec -> this, on a thread -> AsyncLLM with its processes running. The one place that imports
vLLM for an engine in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import psutil

from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.vllm.launch import EngineSpec, engine_arguments, engine_environment

_ONE_AT_A_TIME = threading.Lock()
"""The environment, and what has been started meanwhile, belong to the whole process."""


class EngineProcesses:
    """main: ids of the engine's own processes; what these have started belongs to it too."""

    def __init__(self, main: Sequence[int]):
        self._main = [psutil.Process(pid) for pid in main]
        # By handle, not by id, which another process could have by the time they are killed.
        self._all = [*self._main, *(child for process in self._main for child in process.children(recursive=True))]

    @property
    def pids(self) -> list[int]:
        """The ids of all of them."""
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


class EngineStart:
    """One attempt."""

    def __init__(self, spec: EngineSpec):
        self._spec = spec
        self._given_up = False
        self._others: set[int | None] | None = None

    def run(self) -> Any:
        """The AsyncLLM. Blocks for a minute. Raises EngineDiedError with vLLM's own words when it cannot start."""
        with _ONE_AT_A_TIME, engine_environment(self._spec.config), _without_ctrl_c():
            from vllm import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments = engine_arguments(self._spec, on_cpu=current_platform.is_cpu())
            self._others = {child.pid for child in _engine_cores()}
            try:
                self._check()
                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            except EngineDiedError:
                raise
            except Exception as error:
                raise EngineDiedError(f"vLLM does not start: {type(error).__name__}: {error}") from error
            finally:
                self._others = None
        if self._given_up:
            llm.shutdown()
        self._check()
        return llm

    def give_up(self) -> None:
        """Nobody wants the engine any more; what has been started for it is killed. Without effect when it is up."""
        self._given_up = True
        others = self._others
        if others is not None:
            mine = [child.pid for child in _engine_cores() if child.pid is not None and child.pid not in others]
            if mine:
                EngineProcesses(mine).kill()

    def _check(self) -> None:
        if self._given_up:
            raise EngineDiedError("it was closed while it started")


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Processes started within never get SIGINT: Ctrl-C in a terminal reaches all of a run's processes, and the run
    would lose its engines before it has finished the step and saved. What a thread blocks, its children block."""
    # Where it has to be started first, the tracker lets the signal through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _engine_cores() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")]
