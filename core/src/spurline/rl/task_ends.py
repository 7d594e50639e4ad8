"""End asyncio tasks for certain: cancelled, waited for, and named when they do not let themselves be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from spurline.errors import RunFailedError

T = TypeVar("T")

CANCEL_TIMEOUT_S = 30.0
"""Seconds a cancelled attempt may take to end."""


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
        raise RunFailedError(
            f"{what} was cancelled, but still runs {limit:g} s later. An environment must let "
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
