"""The one thread on which an engine's model is loaded, computed and changed.

Place on the way: engine, on the event loop -> work, one piece after another -> its result, within a time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spurline.errors import RunFailedError

ADVICE = "Raise source.engine.timeout_s (of child_process, generate_timeout_s) when it is only slow."

_Result = TypeVar("_Result")


class ModelThread:
    """timeout_s: seconds a piece of work may take."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spurline-decode")

    async def run(self, what: str, work: Callable[..., _Result], *arguments: object) -> _Result:
        """The result of `work`. Raises RunFailedError naming it when it takes too long."""
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RunFailedError(f"{what} did not end within {self.timeout_s:g} s. {ADVICE}") from error

    def close(self) -> None:
        """Take no further work; what is under way ends by itself."""
        self._executor.shutdown(wait=False)
