"""Await a function that may take long, or for ever, on a thread of its own.

A thread cannot be killed: one whose caller was cancelled or timed out runs on unheard, and as a daemon it keeps no
process alive. What must really end belongs in a process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from spurline.protocols.environment import AttemptFailedError

T = TypeVar("T")


async def in_thread(function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
    """The function's result, or what it raises. Cancelling abandons the thread."""
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

    threading.Thread(target=work, name=f"call-{getattr(function, '__name__', 'function')}", daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return value


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
