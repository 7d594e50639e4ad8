"""Run what environments and rewards do, on the event loop and on threads, and end it for certain.

A thread cannot be killed: one whose caller was cancelled or timed out runs on unheard, and as a daemon it keeps no
process alive. They are counted, and a function that has left too many behind is not called until some have ended. What
must really end belongs in a process. Tasks are cancelled, waited for, and named when they do not let themselves be
cancelled.
"""

from __future__ import annotations

import asyncio
import sysconfig
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spurline.errors import RunFailedError
from spurline_rl.protocols.environment import AttemptFailedError

T = TypeVar("T")

CANCEL_TIMEOUT_S = 30.0
"""Seconds a cancelled attempt may take to end."""
MAX_ABANDONED = 64
"""Threads on which one function may still run although nobody waits for it: each keeps its stack and what it holds, and
one that computes holds the interpreter for 5 ms at a time. Beyond that its calls wait for some to end."""
_LOOK_S = 1.0
"""Seconds between two looks at them."""

_LIBRARIES = (
    "<frozen",
    f"{Path(__file__).parents[1]}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""How the names of files begin that are not the user's own."""


def located(error: BaseException) -> str:
    """Return the exception and the innermost place it came through, outside of libraries where there is one:
    `KeyError: 'unit' (rewards.py:12 in grade)`."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if not frame.filename.startswith(_LIBRARIES)] or every
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    try:
        text = str(error)
    except Exception as unsaid:  # noqa: BLE001 - told; a class of somebody else's must not hide where it was raised
        text = f"its text cannot be had, {type(unsaid).__name__}: {unsaid}"
    return f"{type(error).__name__}: {text}{place}"


async def in_thread(function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
    """Return the function's result, or raise what it raises. Cancelling abandons the thread.

    Waits, up to the caller's own time limit, while too many threads of this function run on already.
    """
    left = _abandoned[_name_of(function)]
    while len(left) >= MAX_ABANDONED:
        left[:] = [thread for thread in left if thread.is_alive()]
        if len(left) >= MAX_ABANDONED:
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
        left.append(thread)
        raise
    if error is not None:
        raise error
    return value


_abandoned: defaultdict[tuple[str, str], list[threading.Thread]] = defaultdict(list)
"""Threads that nobody waits for any more, by module and name of their function."""


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name, also of a method and of an object that is called."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return str(named.__module__), str(named.__qualname__)


async def within(timeout_s: float, what: str, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """Return the result of a plain or an async function. Raises AttemptFailedError naming `what` after `timeout_s`."""
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
    """Return whether calling it gives a coroutine; also for objects with an async `__call__`."""
    return asyncio.iscoroutinefunction(function) or asyncio.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _deliver(done: asyncio.Future[Any], outcome: tuple[Any, Exception | None]) -> None:
    if not done.done():
        done.set_result(outcome)


async def end_tasks(tasks: Iterable[asyncio.Future[Any]], what: str, timeout_s: float | None = None) -> None:
    """Cancel what still runs and wait for it.

    Args:
        tasks: The tasks, also those that have ended.
        what: Their name in the error.
        timeout_s: CANCEL_TIMEOUT_S by default; less for tasks within an attempt, so that they are named, not it.

    Raises:
        RunFailedError: If something goes on.
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
    """Return the error for something that goes on so many seconds after it was cancelled."""
    return RunFailedError(
        f"{what} was cancelled, but still runs {limit_s:g} s later. An environment must let "
        "asyncio.CancelledError pass."
    )


async def all_or_none(
    coroutines: Sequence[Coroutine[Any, Any, T]], what: str, timeout_s: float | None = None
) -> list[T]:
    """Return all results in order; or raise the first error, once everything else was cancelled and has ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_tasks(tasks, what, timeout_s)
