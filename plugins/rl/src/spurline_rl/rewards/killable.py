"""Call a function in processes that are killed when it takes too long or too much memory.

The calls go to a child process, which has imported the function once and makes them in forks of itself
(`worker_processes`), so a killed process is replaced at once. Arguments are pickled; results are JSON, as a process
that has run what a model wrote must not make this one run code.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from spurline import errors
from spurline.child import ChildProcess
from spurline.errors import ConfigError, PluginError, Problem, RunFailedError, SpurlineError
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.rewards.worker_processes import Outcome, WorkerSettings

START_TIMEOUT_S = 120.0
"""Seconds that importing the function may take."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds beyond the limit of the import after which a silent child counts as hanging."""
MEMORY_LIMIT_BYTES = 8 << 30
"""Memory of a worker: a result with billions of digits must not take the machine down."""
_LONGEST_S = 1e6
"""The longest time limit: timers refuse very large numbers."""
_CLOSE_PATIENCE_S = 2.0
"""Seconds the child has to end by itself when the pool is closed; it may be importing something large."""
_ONE_THREAD = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
"""Processes compute side by side already, and a fork would lose a library's threads."""


class TookTooLong(Exception):  # noqa: N818 - the caller decides whether it is an error
    """The call exceeded its limit of time or memory."""


class OutOfMemory(TookTooLong):
    """The call exceeded its limit of memory."""


_PROBLEMS: dict[str, tuple[type[Exception], str]] = {
    "late": (TookTooLong, "{function} took longer than {timeout_s:g} s"),
    "memory": (OutOfMemory, "{function} ran out of memory"),
    "failed": (AttemptFailedError, "{function} failed: {detail}"),
    "died": (AttemptFailedError, "The worker process of {function} died: exit code {detail}"),
    "unknown": (PluginError, "A worker process cannot import {function}: {detail}."),
    "closed": (RunFailedError, "The pool of worker processes is closed."),
}
"""Outcomes other than `value`, as errors."""

_OUR_ERRORS = {
    AttemptFailedError.__name__: AttemptFailedError,
    **{name: value for name, value in vars(errors).items() if isinstance(value, type)},
}


class KillablePool:
    """Processes for one function, for calls from any thread and event loop.

    They start with `start` or with the first call, and again after a death. The calls of an async function wait side by
    side.

    Args:
        function: `module:function` with a result in JSON, or, with an argument, one that returns such a function.
        timeout_s: Seconds of one call.
        workers: The largest number of processes. 0 gives an async function one, and others one per processor.
        argument: The argument of `function`, if it returns the function to call.
        import_timeout_s: Seconds of the import.
        memory_bytes: Memory of one worker.
        shows_output: Whether the output of calls appears among the run's messages.
    """

    def __init__(
        self,
        function: str,
        timeout_s: float,
        workers: int = 1,
        *,
        argument: str | None = None,
        import_timeout_s: float = START_TIMEOUT_S,
        memory_bytes: int = MEMORY_LIMIT_BYTES,
        shows_output: bool = False,
    ) -> None:
        self._settings = WorkerSettings(
            function=function,
            argument=argument,
            timeout_s=min(timeout_s, _LONGEST_S),
            import_timeout_s=min(import_timeout_s, _LONGEST_S),
            workers=workers,
            memory_bytes=memory_bytes,
            output=None,
            python_path=os.environ.get("PYTHONPATH"),
        )
        self._name = argument or function
        self._shows_output = shows_output
        self._lock = threading.Lock()
        self._closed = False
        self._child: ChildProcess | None = None
        self._ready: Future[Outcome] = Future()
        self._numbers = count()
        self._calls: dict[int, Future[Outcome]] = {}

    def start(self) -> None:
        """Start the child, and wait until it has imported the function.

        Raises:
            PluginError: If the import fails or takes too long.
            SpurlineError: If the import raises one of our errors.
        """
        began, limit_s = time.monotonic(), self._settings.import_timeout_s
        with self._lock:
            child, ready = self._running_child(), self._ready
        try:
            outcome = ready.result(limit_s + ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            child.kill()
            raise RunFailedError(f"The process that imports {self._name} does not answer.") from error
        if outcome[0] == "died" and time.monotonic() - began >= limit_s:
            raise PluginError(
                f"Importing {self._name} takes longer than {limit_s:g} s. Move slow work into the first call. The "
                f"import stood here:\n{child.last_words()}"
            )
        if outcome[0] == "died":
            raise PluginError(f"Importing {self._name} ended its process: {self._error(child, outcome)}")
        if outcome[0] != "value":
            raise self._error(child, outcome)

    async def call_async(self, *arguments: Any) -> Any:
        """Return the function's result. If the caller is cancelled, the call is taken back unless it is under way.

        Raises:
            TookTooLong: If it exceeds its limit of time or memory.
            AttemptFailedError: If it raises, or its process dies.
            SpurlineError: If it raises one of our errors.
            PluginError: If it cannot be imported.
            RunFailedError: If the pool is closed.
        """
        number, answer = next(self._numbers), Future[Outcome]()
        packed = base64.b64encode(pickle.dumps(arguments)).decode()
        with self._lock:
            child = self._running_child()
            self._calls[number] = answer
        try:
            child.send({"id": number, "arguments": packed})
            outcome = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            child.send({"cancel": number})
            raise
        finally:
            self._calls.pop(number, None)
        if outcome[0] == "value":
            return outcome[1]
        raise self._error(child, outcome)

    def close(self) -> None:
        """End every process. Calls under way fail, and those that wait for a worker too."""
        with self._lock:
            self._closed, child = True, self._child
        if child is not None:
            child.end(_CLOSE_PATIENCE_S)

    def _running_child(self) -> ChildProcess:
        """Under the lock. Raises RunFailedError once the pool is closed."""
        if self._closed:
            raise RunFailedError(_PROBLEMS["closed"][1])
        if self._child is None:
            self._ready = Future()
            output = None
            # There may be no standard error. The child's own is kept for its last words.
            with suppress(OSError):
                output = os.dup(2) if self._shows_output else None
            self._child = ChildProcess(
                "spurline_rl.rewards.worker_processes",
                (json.dumps(asdict(replace(self._settings, output=output))),),
                take=self._take,
                on_end=self._note_end,
                environment=_ONE_THREAD,
                pass_fds=() if output is None else (output,),
            )
            if output is not None:
                os.close(output)
        return self._child

    def _take(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if "ready" in message:
                self._ready.set_result(tuple(message["ready"]))
            else:
                self._deliver(message["id"], tuple(message["outcome"]))

    def _note_end(self, child: ChildProcess) -> None:
        with self._lock:
            self._child = None
            if not self._ready.done():
                self._ready.set_result(("died", child.exit_code))
            # A child that could not import the function has said why.
            outcome = self._ready.result()
            if outcome[0] == "value":
                outcome = ("died", child.exit_code)
            if self._closed:
                outcome = ("closed", None)
            numbers = list(self._calls)
        for number in numbers:
            self._deliver(number, outcome)

    def _deliver(self, number: int, outcome: Outcome) -> None:
        if (answer := self._calls.get(number)) is not None:
            # The caller may have been cancelled.
            with suppress(InvalidStateError):
                answer.set_result(outcome)

    def _error(self, child: ChildProcess, outcome: Outcome) -> Exception:
        kind, detail = outcome
        if kind == "raised":
            return _our_error(*detail)
        if kind == "died":
            detail = f"{detail}. {child.last_words()}".strip()
        error, text = _PROBLEMS[kind]
        return error(text.format(function=self._name, timeout_s=self._settings.timeout_s, detail=detail))


def _our_error(classes: Sequence[str], text: str, problems: Sequence[tuple[str, str]]) -> SpurlineError:
    """Return the error that a worker has raised, as its nearest class that is known here."""
    if problems:
        return ConfigError([Problem(*problem) for problem in problems])
    known = next(_OUR_ERRORS[name] for name in classes if name in _OUR_ERRORS)
    try:
        return known(text)
    except TypeError:
        # The class takes more than its text.
        return RunFailedError(text)
