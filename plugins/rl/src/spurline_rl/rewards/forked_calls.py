"""Make the calls of a function in a process that may be killed: one after the other, or async ones side by side.

In: calls as lines of JSON, and the time that one may take. Out: what came of each, as lines too. The process is a fork
of the pool's child, which watches it (`worker_processes`).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from types import coroutine
from typing import Any

from spurline.errors import ConfigError, SpurlineError
from spurline_rl.concurrency import is_async, located

Outcome = tuple[str, Any]
"""`value` and the value, or `late`, `memory`, `failed`, `raised`, `died` or `unknown` and what there is to say."""

GRACE_S = 5.0
"""Seconds beyond the time limit after which async calls that have not been answered have a blocked event loop; no
longer than the limit itself."""


class Worker:
    """Makes calls until the other end is closed.

    timeout_s: of one async call; others are killed with the process. running_call: shared memory, the number of the
    call whose code runs, from 1.
    """

    def __init__(
        self, channel: socket.socket, function: Callable[..., Any], timeout_s: float, running_call: memoryview
    ) -> None:
        self._channel, self._function, self._timeout_s, self._running_call = channel, function, timeout_s, running_call

    def serve(self) -> None:
        """Until the other end is closed."""
        if is_async(self._function):
            asyncio.run(self._serve_side_by_side())
            return
        with self._channel.makefile("rb") as calls:
            for line in calls:
                call = json.loads(line)
                outcome = _outcome(lambda arguments=call["arguments"]: self._function(*arguments))
                self._channel.sendall(_line({"id": call["id"], "outcome": outcome}))

    async def _serve_side_by_side(self) -> None:
        self._channel.setblocking(False)
        # Lines of any length: they are the pool's own.
        calls, answers = await asyncio.open_connection(sock=self._channel, limit=1 << 40)
        tasks: set[asyncio.Task[None]] = set()
        while line := await calls.readline():
            call = json.loads(line)
            task = asyncio.ensure_future(self._make(call["id"], call["arguments"], answers))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _make(self, number: int, arguments: list[Any], answers: asyncio.StreamWriter) -> None:
        called = asyncio.ensure_future(self._result(number, arguments))
        await asyncio.wait({called}, timeout=self._timeout_s)
        if called.done():
            outcome = _outcome(called.result) if not called.cancelled() else ("failed", "it cancelled itself")
            answers.write(_line({"id": number, "outcome": outcome}))
            return
        called.cancel()
        answers.write(_line({"id": number, "outcome": ("late", None)}))
        await asyncio.wait({called}, timeout=min(GRACE_S, self._timeout_s))
        if not called.done():
            answers.write(_line({"stuck": number}))
        elif not called.cancelled():
            # Retrieved: it was answered for.
            called.exception()

    async def _result(self, number: int, arguments: list[Any]) -> Any:
        try:
            return await _noting(self._function(*arguments), self._running_call, number + 1)
        except SystemExit as error:
            # asyncio would end the loop with it.
            raise _ExitedError(f"SystemExit: {error}") from error


class _ExitedError(Exception):
    """An async function called sys.exit."""


@coroutine
def _noting(called: Coroutine[Any, Any, Any], running_call: memoryview, number: int) -> Generator[Any, Any, Any]:
    """The coroutine's result. `running_call` holds `number` while its code runs, so that it is known which of many
    calls blocks the event loop."""
    step = partial(called.send, None)
    while True:
        running_call[0] = number
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
        finally:
            running_call[0] = 0
        try:
            step = partial(called.send, (yield awaited))
        except BaseException as error:  # noqa: BLE001 - handed in where it waits
            step = partial(called.throw, error)


def _outcome(call: Callable[[], Any]) -> Outcome:
    """In a worker: what came of the call."""
    try:
        # A result that is no JSON is the function's failure.
        return "value", json.loads(json.dumps(call()))
    except MemoryError:
        return "memory", None
    except SpurlineError as error:
        return told(error)
    except _ExitedError as error:
        return "failed", str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the caller
        return "failed", located(error)


def told(error: SpurlineError) -> Outcome:
    """One of our errors, so that it can be raised again on the other side."""
    problems = [(problem.key, problem.message) for problem in error.problems] if isinstance(error, ConfigError) else []
    return "raised", [[known.__name__ for known in type(error).__mro__], str(error), problems]


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
