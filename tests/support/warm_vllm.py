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
    """Has the environment of the process that made it, as one that is spawned would."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        import setproctitle
        from vllm.v1.executor import multiproc_executor

        # It looks for its place when it is first called, and finds none once the environment is another one.
        setproctitle.getproctitle()
        os.environ.clear()
        os.environ.update(self._environment)
        # It has imported everything, and computes only after it has started these.
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        super().run()


class WarmContext(context.ForkServerContext):
    Process = WarmProcess  # type: ignore[assignment]


def warm_context() -> WarmContext:
    """Return a stand-in for the result of vLLM's `get_mp_context`."""
    forkserver.set_forkserver_preload(_IMPORTED)
    return WarmContext()
