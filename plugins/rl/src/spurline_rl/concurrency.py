"""Run what environments and rewards do, on the event loop and on threads, and end it for certain.

A thread cannot be killed: one whose caller was cancelled or timed out runs on unheard, and as a daemon it keeps no
process alive. They are counted, and a function that has left too many behind is not called until some have ended. What
must really end belongs in a process. Tasks are cancelled, waited for, and named when they do not let themselves be
cancelled.
"""

from __future__ import annotations

import asyncio
import math
import os
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spurline.errors import RunFailedError
from spurline_rl.functions import hidden_module
from spurline_rl.protocols.environment import AttemptFailedError

T = TypeVar("T")

CANCEL_TIMEOUT_S = 30.0
"""Seconds a cancelled attempt may take to end."""
MAX_ABANDONED = 1024
"""Threads on which one function may still run although nobody waits for it: each keeps its stack and what it holds.
Beyond that its calls wait for some to end."""
PATIENCE_S = 300.0
"""Seconds that there may be so many: what a service that hangs, or attempts that run out of time together, leave behind
is gone by then."""
MAX_COMPUTING = 8
"""Such threads that compute, which a run cannot wait for. Each holds the interpreter for 5 ms at a time, so that
everything else gets its turn every 40 ms at best."""
_COMPUTES_S = 0.25
"""Least processor time, since it was left behind, of a thread that computes."""
_SHARE = 4
"""A thread that computes gets this part, at least, of what it would get if all that are left behind computed on one
processor; one that only looks again and again whether something has happened does not."""
_LOOK_S = 1.0
"""Seconds between two looks at those of one function; one at 1,024 of them takes tens of milliseconds."""

_LIBRARIES = (
    "<frozen",
    f"{Path(__file__).parents[1]}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""How the names of files begin that are not the user's own."""


def located(error: BaseException) -> str:
    """The exception and the innermost place it came through, outside of libraries where there is one:
    `KeyError: 'unit' (rewards.py:12 in grade)`."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if not frame.filename.startswith(_LIBRARIES)] or every
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    try:
        text = str(error)
    except Exception as unsaid:  # noqa: BLE001 - told; a class of somebody else's must not hide where it was raised
        text = f"its text cannot be had, {type(unsaid).__name__}: {unsaid}"
    hint = hidden_module(error)
    return f"{type(error).__name__}: {text}{place}{'.' if hint else ''}{hint}"


async def in_thread(function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
    """The function's result, or what it raises. Cancelling abandons the thread.

    Waits while too many threads of this function run on already. Raises RunFailedError when they compute, or do not
    end either.
    """
    name = _name_of(function)
    while name in _abandoned and _abandoned[name].are_too_many():
        await asyncio.sleep(_LOOK_S)
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def work() -> None:
        try:
            outcome: tuple[Any, Exception | None] = (function(*arguments, **keywords), None)
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            outcome = (None, error)
        except BaseException as error:  # noqa: BLE001 - `sys.exit()` in a reward or tool must not end the run
            outcome = (None, RuntimeError(f"it raised {type(error).__name__}({error})"))
        try:
            loop.call_soon_threadsafe(_deliver, done, outcome)
        except RuntimeError:
            # The loop is closed, so nobody waits any more.
            return

    thread = threading.Thread(target=work, name=f"call-{getattr(function, '__name__', 'function')}", daemon=True)
    thread.start()
    try:
        value, error = await done
    except asyncio.CancelledError:
        _abandoned.setdefault(name, _Abandoned(".".join(name))).add(thread)
        raise
    if error is not None:
        raise error
    return value


class _Abandoned:
    """The threads of one function that nobody waits for any more."""

    def __init__(self, name: str) -> None:
        self._name = name
        # When each was left behind, and the processor time that it had used by then.
        self._left: dict[threading.Thread, tuple[float, float]] = {}
        self._looked_at = -math.inf
        self._too_many_since: float | None = None

    def add(self, thread: threading.Thread) -> None:
        self._left[thread] = time.monotonic(), _processor_seconds(thread)

    def are_too_many(self) -> bool:
        """Whether to wait for some of them to end. Raises RunFailedError when more compute than a run can bear, or when
        there have been too many for longer than PATIENCE_S."""
        now = time.monotonic()
        if len(self._left) >= min(MAX_ABANDONED, MAX_COMPUTING) and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._left = {thread: then for thread, then in self._left.items() if thread.is_alive()}
            computing = self._num_computing(now)
            if computing >= MAX_COMPUTING:
                raise self._error(f"{computing} of them compute")
        if len(self._left) < MAX_ABANDONED:
            self._too_many_since = None
            return False
        if self._too_many_since is None:
            self._too_many_since = now
        if now - self._too_many_since > PATIENCE_S:
            raise self._error(f"for more than {PATIENCE_S:g} s there have been {MAX_ABANDONED} or more")
        return True

    def _num_computing(self, now: float) -> int:
        return sum(
            _processor_seconds(thread) - before_s >= max(_COMPUTES_S, (now - left_at) / (_SHARE * len(self._left)))
            for thread, (left_at, before_s) in self._left.items()
        )

    def _error(self, problem: str) -> RunFailedError:
        return RunFailedError(
            f"{self._name} still runs on {len(self._left)} threads that were left behind, because it took longer than "
            f"its time limit or its attempt was ended; {problem}. Nothing can stop a thread. Let the function end by "
            "itself, with time limits on what it waits for, or run it in a process: a reward function without "
            "in_process: true, an agent as a command."
        )


_abandoned: dict[tuple[str, str], _Abandoned] = {}
"""By module and name of the function."""


def _processor_seconds(thread: threading.Thread) -> float:
    """That the thread has used; 0 when it has ended, or where the system does not tell."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name, also of a method and of an object that is called."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return str(named.__module__), str(named.__qualname__)


async def within(timeout_s: float, what: str, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """The result of a plain or an async function. Raises AttemptFailedError naming `what` after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if is_async(function):
                return await function(*arguments, **keywords)
            return await in_thread(function, *arguments, **keywords)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise AttemptFailedError(f"{what} did not return within {timeout_s:g} s.") from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; also for objects with an async `__call__`."""
    return asyncio.iscoroutinefunction(function) or asyncio.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _deliver(done: asyncio.Future[Any], outcome: tuple[Any, Exception | None]) -> None:
    if not done.done():
        done.set_result(outcome)


async def end_tasks(tasks: Iterable[asyncio.Future[Any]], what: str, timeout_s: float | None = None) -> None:
    """Cancel what still runs and wait for it. Raises RunFailedError naming `what` when something goes on.

    timeout_s: CANCEL_TIMEOUT_S by default; tasks within an attempt want less, so that they are named, not the attempt.
    """
    limit = CANCEL_TIMEOUT_S if timeout_s is None else timeout_s
    everything = list(tasks)
    running = [task for task in everything if not task.done()]
    for task in running:
        task.cancel()
    stuck = (await asyncio.wait(running, timeout=limit))[1] if running else set[asyncio.Future[Any]]()
    for task in everything:
        # What is raised besides the first error, or on the way out of a cancelled task, must neither cover it nor be
        # told again as never retrieved.
        _ = task.done() and (task.cancelled() or task.exception())
    if stuck:
        raise still_runs(what, limit)


def still_runs(what: str, limit_s: float) -> RunFailedError:
    """The error for something that goes on so many seconds after it was cancelled."""
    return RunFailedError(
        f"{what} was cancelled, but still runs {limit_s:g} s later. An environment must let "
        "asyncio.CancelledError pass."
    )


async def all_or_none(
    coroutines: Sequence[Coroutine[Any, Any, T]], what: str, timeout_s: float | None = None
) -> list[T]:
    """All results in order; or the first error, once everything else has been cancelled and has ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_tasks(tasks, what, timeout_s)
