"""End asyncio tasks for certain: cancelled, waited for, and named when they do not let themselves be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from spurline.errors import RunFailedError

T = TypeVar("T")

CANCEL_TIMEOUT_S = 20.0
"""Seconds a cancelled task may take; less than what an attempt has to end in."""


async def end_tasks(tasks: Iterable[asyncio.Future[Any]], what: str) -> None:
    """Cancel what still runs and wait for it. Raises RunFailedError naming `what` when something goes on."""
    running = [task for task in tasks if not task.done()]
    if not running:
        return
    for task in running:
        task.cancel()
    ended, stuck = await asyncio.wait(running, timeout=CANCEL_TIMEOUT_S)
    for task in ended:
        # What is raised on the way out of a cancelled task must not cover what it was cancelled for.
        _ = task.cancelled() or task.exception()
    if stuck:
        raise RunFailedError(
            f"{what} was cancelled, but still runs {CANCEL_TIMEOUT_S:g} s later. It must let "
            "asyncio.CancelledError pass."
        )


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]], what: str) -> list[T]:
    """All results in order; or the first error, once everything else has ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_tasks(tasks, what)
