"""Do beside the event loop what takes long there: read a request, lay out its prompt, write its answer.

One request of a session is worked on at a time, in the order in which requests came: an agent that asks for much waits
for itself, and which of two turns is the first does not depend on the threads. What is small is done at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

NUM_THREADS = 2
SMALL_BYTES = 16 * 1024
"""Requests of this size take a few milliseconds, not much more than to wake a thread on a busy machine."""


class WorkQueue:
    """What one session has to be done; used on its event loop alone."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._is_running = False
        self._num_awaited = 0

    async def run(self, num_bytes: int, function: Callable[[], T]) -> T:
        """What the function returns, or raises; num_bytes: of the request or answer it handles.

        Who is cancelled goes away at once; a function that has begun goes on, and the next one waits for it.
        """
        if num_bytes <= SMALL_BYTES and not self._num_awaited and not self._is_running:
            return function()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((done, function))
        if not self._is_running:
            self._start_next()
        self._num_awaited += 1
        try:
            return await done
        finally:
            # Only here, where the caller goes on: nothing small may come between it and its result.
            self._num_awaited -= 1

    def _start_next(self) -> None:
        self._is_running = False
        while self._waiting and not self._is_running:
            done, function = self._waiting.popleft()
            if done.cancelled():
                continue
            self._is_running = True
            working = asyncio.get_running_loop().run_in_executor(self._threads, function)
            working.add_done_callback(lambda working, done=done: self._finish(done, working))

    def _finish(self, done: asyncio.Future[Any], working: asyncio.Future[Any]) -> None:
        error = None if working.cancelled() else working.exception()
        if working.cancelled():
            done.cancel()
        elif not done.done():
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(working.result())
        self._start_next()
