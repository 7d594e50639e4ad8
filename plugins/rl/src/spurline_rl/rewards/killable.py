"""Call a function in processes that are killed when it takes too long.

For code that may hang where no thread can be stopped, or take all memory. The calls go to a child process, which has
imported the function once and makes them in forks of itself (`worker_processes`): one that is killed is replaced in no
time. Arguments and results are JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from spurline import errors
from spurline.child import ChildProcess
from spurline.errors import ConfigError, PluginError, Problem, RunFailedError, SpurlineError
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.rewards.forked_calls import Outcome
from spurline_rl.rewards.worker_processes import WorkerSettings

START_TIMEOUT_S = 120.0
"""Seconds that importing the function may take."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds beyond the limits of import and call after which the child itself must hang when it says nothing."""
_SECOND_LOOK_S = 1.0
"""Seconds in which a run that has stood still itself, as with SIGSTOP, takes what the child has said meanwhile."""
_LONGEST_S = 1e6
"""Seconds, the most that the import may take: timers take no number that is very large."""
_CLOSE_PATIENCE_S = 2.0
"""Seconds the child has to end by itself when the pool is closed; it may be importing something large."""
MEMORY_LIMIT_BYTES = 8 << 30
"""Memory of a worker: a result with billions of digits must not take the machine down."""


SHOWN_BYTES = 1 << 20
"""Bytes that are shown of what all calls of a pool print: a disk must not fill up with it."""


class TookTooLong(Exception):  # noqa: N818 - a finding about one call, for the caller to judge
    """The call exceeded its limit of time or memory."""


class OutOfMemory(TookTooLong):
    """The call exceeded its limit of memory."""


_PROBLEMS: dict[str, tuple[type[Exception], str]] = {
    "late": (TookTooLong, "{function} took longer than {timeout_s:g} s"),
    "memory": (OutOfMemory, "{function} ran out of memory"),
    "failed": (AttemptFailedError, "{function} failed: {detail}"),
    "died": (AttemptFailedError, "The worker process of {function} died: exit code {detail}"),
    "unknown": (PluginError, "A worker process cannot import {function}: {detail}."),
}
"""What an answer may say instead of `value`."""

_ENDED_WITH_ANOTHER: Outcome = ("ended_with_another", None)
"""Of a call whose child was killed because it did not answer another one: it is made again."""

_OUR_ERRORS = {
    AttemptFailedError.__name__: AttemptFailedError,
    **{name: value for name, value in vars(errors).items() if isinstance(value, type)},
}


class KillablePool:
    """Processes for one function, for calls from any thread and event loop. They start with `start` or with the first
    call, and again after a death.

    function: `module:function`; JSON-able arguments and result. An async one is called many times side by side.
    adapter: `module:function` that makes the function out of `function`, whatever that is then.
    workers: processes at most; 0 for one where the function is async, and otherwise as many as there are processors,
    within bounds. imports: modules that the function imports when it is called. import_timeout_s: START_TIMEOUT_S by
    default. memory_bytes: of one worker. shows_output: the first SHOWN_BYTES of what it prints go where the run's
    messages go.
    """

    def __init__(
        self,
        function: str,
        timeout_s: float,
        workers: int = 1,
        imports: Sequence[str] = (),
        *,
        adapter: str = "",
        import_timeout_s: float | None = None,
        memory_bytes: int = MEMORY_LIMIT_BYTES,
        shows_output: bool = False,
    ) -> None:
        self._function, self._timeout_s = function, timeout_s
        self._import_timeout_s = min(START_TIMEOUT_S if import_timeout_s is None else import_timeout_s, _LONGEST_S)
        self._settings = WorkerSettings(
            function=function,
            adapter=adapter,
            imports=tuple(imports),
            timeout_s=timeout_s,
            import_timeout_s=self._import_timeout_s,
            workers=workers,
            memory_bytes=memory_bytes,
            output=None,
            python_path=os.environ.get("PYTHONPATH"),
        )
        self._shows_output = shows_output
        self._left_to_show = SHOWN_BYTES
        self._showing: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._child: ChildProcess | None = None
        self._ready: Future[Outcome] = Future()
        self._hung: ChildProcess | None = None
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Outcome]] = {}
        self._heard_at = 0.0

    def start(self) -> None:
        """Start the child, and wait until it has imported the function.

        Raises PluginError when that cannot be done or takes too long, and what the adapter raises of our own errors.
        """
        began = time.monotonic()
        with self._lock:
            child, ready = self._running_child(), self._ready
        try:
            outcome = ready.result(self._import_timeout_s + ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            child.kill()
            raise RunFailedError(f"The process that imports {self._function} does not answer.") from error
        if outcome[0] == "died" and time.monotonic() - began >= self._import_timeout_s:
            raise PluginError(
                f"Importing {self._function} takes longer than {self._import_timeout_s:g} s. What takes long belongs "
                f"into the first call. It stood here:\n{child.last_words()}"
            )
        if outcome[0] == "died":
            raise PluginError(f"Importing {self._function} ended its process: {self._error(child, outcome)}")
        if outcome[0] != "value":
            raise self._error(child, outcome)

    async def call_async(self, *arguments: Any) -> Any:
        """The function's result. A call whose caller is cancelled is taken back unless it is under way.

        Raises TookTooLong, AttemptFailedError when it raises or its process dies, what it raises of our own errors,
        PluginError when it cannot be imported, RunFailedError once the pool is closed, and TypeError for arguments that
        are no JSON.
        """
        outcome = _ENDED_WITH_ANOTHER
        while outcome == _ENDED_WITH_ANOTHER:
            # Each time round, the call that the child was killed for has failed: there is an end to them.
            child, outcome = await self._answer(arguments)
        if outcome[0] == "value":
            return outcome[1]
        raise self._error(child, outcome)

    def call(self, *arguments: Any) -> Any:
        """`call_async`, for callers without an event loop."""
        return asyncio.run(self.call_async(*arguments))

    async def _answer(self, arguments: Sequence[Any]) -> tuple[ChildProcess, Outcome]:
        """What came of one call, and the child that it went to."""
        patience_s = self._import_timeout_s + self._timeout_s + ANSWER_TIMEOUT_S
        loop = asyncio.get_running_loop()
        number, outcome = next(self._numbers), loop.create_future()
        with self._lock:
            child = self._running_child()
            self._calls[number] = outcome
        sent_at = time.monotonic()

        def look(again: bool = False) -> None:
            # As long as calls are under way, one of them ends within its limit, and the child says so.
            nonlocal timer
            silent_s = time.monotonic() - max(self._heard_at, sent_at)
            if outcome.done():
                return
            if silent_s < patience_s:
                timer = loop.call_later(patience_s - silent_s, look)
                return
            if not again:
                timer = loop.call_later(_SECOND_LOOK_S, look, True)
                return
            self._hung = child
            child.kill()
            outcome.set_exception(
                RunFailedError(f"No worker process of {self._function} answered in {patience_s:g} s.")
            )

        timer = loop.call_later(patience_s, look)
        try:
            child.send({"id": number, "arguments": arguments})
            return child, await outcome
        except asyncio.CancelledError:
            child.send({"cancel": number})
            raise
        finally:
            timer.cancel()
            self._calls.pop(number, None)

    def close(self) -> None:
        """End every process. Calls under way fail, those that wait for a worker too."""
        with self._lock:
            self._closed, child = True, self._child
        if child is not None:
            child.end(_CLOSE_PATIENCE_S)
        if self._showing is not None:
            # What a call has left running may hold the pipe open.
            self._showing.join(_CLOSE_PATIENCE_S)

    def _running_child(self) -> ChildProcess:
        """Under the lock. Raises RunFailedError once the pool is closed."""
        if self._closed:
            raise RunFailedError("The pool of worker processes is closed.")
        if self._child is None:
            self._ready = Future()
            # Its own standard error is kept, to be told when it dies.
            with self._output() as output:
                self._child = ChildProcess(
                    "spurline_rl.rewards.worker_processes",
                    (json.dumps(asdict(replace(self._settings, output=output))),),
                    take=self._take,
                    on_end=self._note_end,
                    environment=_ONE_THREAD,
                    pass_fds=() if output is None else (output,),
                )
        return self._child

    @contextmanager
    def _output(self) -> Iterator[int | None]:
        """Yield the pipe that calls print into; None where nothing is shown."""
        try:
            shown = os.dup(2) if self._shows_output else None
        except OSError:
            # This process has none, so that there is nowhere to show anything.
            shown = None
        if shown is None:
            yield None
            return
        printed, pipe = os.pipe()
        name = f"output-{self._function}"
        self._showing = threading.Thread(target=self._show, args=(printed, shown), name=name, daemon=True)
        self._showing.start()
        try:
            yield pipe
        finally:
            os.close(pipe)

    def _show(self, printed: int, shown: int) -> None:
        """Pass on the first of what calls print, and let the rest go, until no process is left that may print."""
        with open(printed, "rb", buffering=0) as pipe, open(shown, "wb", buffering=0) as out:
            while part := pipe.read(1 << 16):
                if self._left_to_show <= 0:
                    continue
                said = part[: self._left_to_show]
                self._left_to_show -= len(said)
                if self._left_to_show == 0:
                    words = (
                        f"{self._function} has printed {SHOWN_BYTES / 2**20:g} MiB; what else it prints is not shown."
                    )
                    said += f"\n{words}\n".encode()
                # A terminal may be gone; what prints must go on all the same.
                with suppress(OSError):
                    out.write(said)

    def _take(self, messages: list[dict[str, Any]]) -> None:
        outcomes: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Outcome], Outcome]]] = defaultdict(list)
        with self._lock:
            self._heard_at = time.monotonic()
            for message in messages:
                if "ready" in message:
                    self._ready.set_result(tuple(message["ready"]))
                # Nobody waits for one that was cancelled.
                elif (call := self._calls.get(message["id"])) is not None:
                    outcomes[call.get_loop()].append((call, tuple(message["outcome"])))
        _deliver(outcomes)

    def _note_end(self, child: ChildProcess) -> None:
        outcomes: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Outcome], Outcome]]] = defaultdict(list)
        with self._lock:
            self._child = None
            died: Outcome = "died", child.exit_code
            if not self._ready.done():
                self._ready.set_result(died)
            # Once the pool is closed, making it again says so.
            ended = _ENDED_WITH_ANOTHER if child is self._hung or self._closed else died
            for call in self._calls.values():
                outcomes[call.get_loop()].append((call, ended))
        _deliver(outcomes)

    def _error(self, child: ChildProcess, outcome: Outcome) -> Exception:
        kind, detail = outcome
        if kind == "raised":
            return _our_error(*detail)
        if kind == "died":
            detail = f"{detail}. {child.last_words()}".strip()
        error, text = _PROBLEMS[kind]
        return error(text.format(function=self._function, timeout_s=self._timeout_s, detail=detail))


_ONE_THREAD = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
"""The processes are what computes side by side; and a library's threads would be lost in a fork."""


def _our_error(classes: Sequence[str], text: str, problems: Sequence[tuple[str, str]]) -> SpurlineError:
    """The error that was raised in a worker, of the nearest class that is known here."""
    if problems:
        return ConfigError([Problem(*problem) for problem in problems])
    known = next(_OUR_ERRORS[name] for name in classes if name in _OUR_ERRORS)
    try:
        return known(text)
    except TypeError:
        # One that takes more than its text.
        return RunFailedError(text)


def _deliver(
    outcomes: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Outcome], Outcome]]],
) -> None:
    for loop, of_loop in outcomes.items():
        # A loop that is closed has nobody who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_set, of_loop)


def _set(outcomes: list[tuple[asyncio.Future[Outcome], Outcome]]) -> None:
    for call, outcome in outcomes:
        if not call.done():
            call.set_result(outcome)
