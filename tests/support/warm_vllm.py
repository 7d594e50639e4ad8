"""vLLM's processes as forks: of one that has imported vLLM, and of each other.

An engine has two, and each would spend eight seconds of CPU on imports, which are no part of what tests are about.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import context, forkserver
from typing import Any

_IMPORTED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "spurline_async_rl.engines.vllm.worker_extension",
]


class WarmProcess(context.ForkServerProcess):
    """A process with the environment of its creator, as if it was spawned."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        import setproctitle
        from vllm.v1.executor import multiproc_executor

        # setproctitle finds its place at its first call, and only before the environment changes.
        setproctitle.getproctitle()
        os.environ.clear()
        os.environ.update(self._environment)
        # Workers can be forked, since nothing computes before they are started.
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        super().run()


class WarmContext(context.ForkServerContext):
    Process = WarmProcess  # type: ignore[assignment]


def warm_context() -> WarmContext:
    """Return a stand-in for the result of vLLM's `get_mp_context`."""
    forkserver.set_forkserver_preload(_IMPORTED)
    return WarmContext()
