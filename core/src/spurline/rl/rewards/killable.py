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
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from pkgutil import resolve_name
from typing import Any

from pebble import ProcessExpired, ProcessPool

from spurline.errors import PluginError, RunFailedError
from spurline.protocols.environment import AttemptFailedError
from spurline.ranks.child import ChildProcess, Parent, end_with

START_TIMEOUT_S = 120.0
"""Seconds that importing the function may take."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds beyond the limits of import and call after which the pool itself must hang."""
_CLOSE_PATIENCE_S = 2.0
"""Seconds the workers have to end by themselves when the pool is closed; they may be importing something large."""
MEMORY_LIMIT_BYTES = 8 << 30
"""Address space of a worker: a result with billions of digits must not take the machine down."""


class TookTooLong(Exception):  # noqa: N818 - a finding about one call, for the caller to judge
    """The call exceeded its limit of time or memory."""


_PROBLEMS: dict[str, tuple[type[Exception], str]] = {
    "late": (TookTooLong, "{function} took longer than {timeout_s:g} s"),
    "memory": (TookTooLong, "{function} ran out of memory"),
    "failed": (AttemptFailedError, "{function} failed: {detail}"),
    "died": (AttemptFailedError, "The worker process of {function} died: exit code {detail}"),
    "unknown": (PluginError, "A worker process cannot import {function}: {detail}."),
}
"""What an answer may say instead of `value`."""

Outcome = tuple[str, Any]
"""`value` and the value, or a problem and its detail."""

_ENDED_WITH_ANOTHER: Outcome = ("ended_with_another", None)
"""Of a call whose child was killed as another call got no answer: it is made again."""


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
        self._hung: ChildProcess | None = None
        self._numbers = count()
        self._outcomes: dict[int, Future[Outcome]] = {}

    def call(self, *arguments: Any) -> Any:
        """The function's result.

        Raises TookTooLong, AttemptFailedError when it raises or its process dies, PluginError when it cannot be
        imported, and RunFailedError once the pool is closed.
        """
        with self._free:
            kind, detail = _ENDED_WITH_ANOTHER
            while (kind, detail) == _ENDED_WITH_ANOTHER:
                # Each time round, the call that the child was killed for has failed: there is an end to them.
                child, (kind, detail) = self._answer(arguments)
        if kind == "value":
            return detail
        if kind == "died":
            detail = f"{detail}. {child.last_words()}".strip()
        error, text = _PROBLEMS[kind]
        raise error(text.format(function=self._function, timeout_s=self._timeout_s, detail=detail))

    def _answer(self, arguments: Sequence[Any]) -> tuple[ChildProcess, Outcome]:
        """What came of one call, and the child that it went to."""
        limit_s = START_TIMEOUT_S + self._timeout_s + ANSWER_TIMEOUT_S
        number, outcome = next(self._numbers), Future[Outcome]()
        with self._lock:
            if self._closed:
                raise RunFailedError("The pool of worker processes is closed.")
            child = self._child = self._child or ChildProcess(
                __name__, self._arguments, take=self._take, on_end=self._note_end
            )
            self._outcomes[number] = outcome
        child.send({"id": number, "arguments": arguments})
        try:
            return child, outcome.result(limit_s)
        except TimeoutError as error:
            self._hung = child
            child.kill()
            raise RunFailedError(f"No worker process of {self._function} answered in {limit_s:g} s.") from error
        finally:
            self._outcomes.pop(number, None)

    def close(self) -> None:
        """End every process. Calls under way fail, those that wait for a worker too."""
        with self._lock:
            self._closed, child = True, self._child
        if child is not None:
            child.end(_CLOSE_PATIENCE_S)

    def _take(self, answers: list[dict[str, Any]]) -> None:
        with self._lock:
            for answer in answers:
                outcome = self._outcomes.get(answer["id"])
                # The end of the process may have answered for it already.
                if outcome is not None and not outcome.done():
                    outcome.set_result(answer["outcome"])

    def _note_end(self, child: ChildProcess) -> None:
        with self._lock:
            self._child = None
            ended = _ENDED_WITH_ANOTHER if child is self._hung and not self._closed else ("died", child.exit_code)
            for outcome in tuple(self._outcomes.values()):
                if not outcome.done():
                    outcome.set_result(ended)


def main(parent: Parent) -> None:
    """The child process: take calls until the parent closes its end."""
    function, timeout_s, workers, *imports = parent.arguments
    problem: Outcome | None = None
    try:
        for module in imports:
            importlib.import_module(module)
        resolve_name(function)
    except Exception as error:  # noqa: BLE001 - told to every caller
        problem = "unknown", _describe(error)
    # A fork has the imports; the only threads here are the pool's own. Other systems than Linux cannot fork safely.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPool(int(workers), initializer=_prepare, initargs=(os.getpid(),), context=context)
    for calls in parent.messages():
        for call in calls:
            if problem is not None:
                parent.send({"id": call["id"], "outcome": problem})
                continue
            future = pool.schedule(_outcome, (function, call["arguments"]), timeout=float(timeout_s))
            future.add_done_callback(partial(_answer, parent, call["id"]))
    pool.stop()
    pool.join()


def _prepare(pool: int) -> None:
    """Make a new worker one that can be ended, and that no result can make too large."""
    end_with(pool)
    # The pool ends a worker by this signal, which Python would hear only between two of its instructions.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _outcome(function: str, arguments: Sequence[Any]) -> Outcome:
    """In a worker: what came of the call."""
    try:
        # A result that is no JSON is the function's failure.
        return "value", json.loads(json.dumps(resolve_name(function)(*arguments)))
    except MemoryError:
        return "memory", None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the caller
        return "failed", _describe(error)


def _answer(parent: Parent, number: int, future: Future[Outcome]) -> None:
    match future.exception():
        case None:
            outcome = future.result()
        case TimeoutError():
            outcome = "late", None
        case ProcessExpired() as error:
            outcome = "died", error.exitcode
        case error:
            outcome = "failed", _describe(error)
    parent.send({"id": number, "outcome": outcome})


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
