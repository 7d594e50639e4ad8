"""Call a function in processes that are killed when it takes too long.

For code that may hang inside a library, where no thread can be stopped. The calls go to a child process, which has
imported the function once and keeps a pool of forks of itself: one that is killed is replaced in no time. Arguments and
results are JSON.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from pebble import ProcessExpired, ProcessPool

from spurline.errors import PluginError, RunFailedError
from spurline.protocols.environment import AttemptFailedError
from spurline.ranks.child import EXIT_TIMEOUT_S, ChildProcess, Parent, end_with

START_TIMEOUT_S = 120.0
"""Seconds that importing the function may take."""
MEMORY_LIMIT_BYTES = 8 << 30
"""Address space of a worker: a result with billions of digits must not take the machine down."""

_START = -1
"""The number of the answer that says whether the function could be imported."""


class TookTooLong(Exception):  # noqa: N818 - a finding about one call, for the caller to judge
    """The call exceeded its limit of time or memory."""


class KillablePool:
    """Processes for one function, for calls from any thread. They start with the first call, and again after a death.

    function: `module:function`; JSON-able arguments and result. imports: modules that it imports when it is called.
    """

    def __init__(self, function: str, timeout_s: float, workers: int = 1, imports: Sequence[str] = ()) -> None:
        self._function, self._timeout_s = function, timeout_s
        self._arguments = (function, timeout_s, workers, *imports)
        # Every call ahead of one that waits has its limit, so that the wait has an end.
        self._free = threading.Semaphore(workers)
        self._lock = threading.Lock()
        self._closed = False
        self._child: ChildProcess | None = None
        self._numbers = count(_START + 1)
        self._answers: dict[int, Future[dict[str, Any]]] = {}

    def call(self, *arguments: Any) -> Any:
        """The function's result.

        Raises TookTooLong, AttemptFailedError when it raises or its process dies, PluginError when it cannot be
        imported, and RunFailedError once the pool is closed.
        """
        with self._free:
            number, answer = next(self._numbers), Future[dict[str, Any]]()
            with self._lock:
                if self._closed:
                    raise RunFailedError("The pool of worker processes is closed.")
                child = self._child = self._child or self._start()
                start, self._answers[number] = self._answers[_START], answer
            try:
                ready = self._wait(child, start, f"import {self._function}", START_TIMEOUT_S)
                if "error" in ready:
                    raise PluginError(f"A worker process cannot import {self._function}: {ready['error']}.")
                child.send({"id": number, "arguments": arguments})
                reply = self._wait(child, answer, f"answer for {self._function}", self._timeout_s + EXIT_TIMEOUT_S)
            finally:
                self._answers.pop(number, None)
        if "late" in reply:
            raise TookTooLong(f"{self._function} took longer than {self._timeout_s:g} s")
        if "memory" in reply:
            raise TookTooLong(f"{self._function} ran out of memory")
        if "error" in reply:
            raise AttemptFailedError(f"{self._function} failed: {reply['error']}")
        return reply["value"]

    def close(self) -> None:
        """End every process. Calls under way fail, those that wait for a worker too."""
        with self._lock:
            self._closed, child = True, self._child
        if child is not None:
            child.end(EXIT_TIMEOUT_S)

    def _start(self) -> ChildProcess:
        self._answers = {_START: Future()}
        return ChildProcess(__name__, self._arguments, take=self._take, on_end=self._note_end)

    def _take(self, replies: list[dict[str, Any]]) -> None:
        for reply in replies:
            if (answer := self._answers.get(reply["id"])) is not None:
                answer.set_result(reply)

    def _note_end(self, child: ChildProcess) -> None:
        with self._lock:
            self._child = None
            for answer in tuple(self._answers.values()):
                if not answer.done():
                    answer.set_result({"died": child.exit_code})

    def _wait(self, child: ChildProcess, answer: Future[dict[str, Any]], what: str, limit_s: float) -> dict[str, Any]:
        try:
            reply = answer.result(limit_s)
        except TimeoutError as error:
            child.kill()
            raise RunFailedError(f"A worker process did not {what} within {limit_s:g} s.") from error
        if "died" in reply:
            died = f"exit code {reply['died']}. {child.last_words()}"
            raise AttemptFailedError(f"The worker process of {self._function} died: {died}".strip())
        return reply


def main(parent: Parent) -> None:
    """The child process: take calls until the parent closes its end."""
    function, timeout_s, workers, *imports = parent.arguments
    try:
        for module in imports:
            importlib.import_module(module)
        _load(function)
    except Exception as error:  # noqa: BLE001 - told to the parent
        parent.send({"id": _START, "error": _describe(error)})
        return
    parent.send({"id": _START})
    # A fork has the imports; the only threads here are the pool's own. Other systems than Linux cannot fork safely.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPool(int(workers), initializer=_prepare, initargs=(os.getpid(),), context=context)
    for calls in parent.messages():
        for call in calls:
            future = pool.schedule(_answer, (function, call["arguments"]), timeout=float(timeout_s))
            future.add_done_callback(partial(_reply, parent, call["id"]))
    pool.stop()
    pool.join()


def _prepare(pool: int) -> None:
    """Make a new worker one that can be ended, and that no result can make too large."""
    end_with(pool)
    # The pool ends a worker by this signal, which Python would hear only between two of its instructions.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _answer(function: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """In a worker: the result, checked to be JSON, or what went wrong."""
    try:
        return {"value": json.loads(json.dumps(_load(function)(*arguments)))}
    except MemoryError:
        return {"memory": True}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the parent
        return {"error": _describe(error)}


def _reply(parent: Parent, number: int, future: Future[dict[str, Any]]) -> None:
    error = future.exception()
    if error is None:
        reply = future.result()
    elif isinstance(error, TimeoutError):
        reply = {"late": True}
    elif isinstance(error, ProcessExpired):
        reply = {"died": error.exitcode}
    else:
        reply = {"error": _describe(error)}
    parent.send({"id": number, **reply})


def _load(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
