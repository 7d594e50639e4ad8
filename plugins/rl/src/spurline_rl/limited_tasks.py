"""Run many coroutines on one event loop: so many at a time, each within a time limit.

Tens of thousands of attempts are under way at a time, so each costs one task and one entry of a dictionary: a job that
waits for a place has no task yet, and one timer watches over all time limits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from spurline_rl import concurrency
from spurline_rl.protocols.environment import AttemptFailedError

T = TypeVar("T")

_TICK_S = 0.1
"""Seconds between two looks at the time limits, at least."""


class Job(ABC, Generic[T]):
    """A piece of work that is run as a task. `task` is None before it has a place."""

    __slots__ = ("began", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[T] | None = None
        self.began = 0.0

    @property
    @abstractmethod
    def is_wanted(self) -> bool:
        """Return whether anybody waits for it; one that nobody waits for does not begin."""

    @property
    @abstractmethod
    def what(self) -> str:
        """It in words, for messages."""

    @abstractmethod
    def run(self) -> Coroutine[Any, Any, T]:
        """The work; asked for when there is a place."""

    @abstractmethod
    def ended(self, result: T | None, error: BaseException | None) -> None:
        """Called on the event loop when the task has ended, or goes on although it was cancelled at its time limit.

        Args:
            error: None where there is a result; AttemptFailedError after the time limit and when its own code cancelled
                it, RunFailedError when it goes on. It is not raised on the way: its traceback would hold what it passes
                through. Must not raise.
        """


class LimitedTasks(Generic[T]):
    """Runs jobs in the order in which they were submitted.

    Args:
        max_running: Jobs under way at the same time.
        timeout_s: Of each, from when it has a place.
        seconds_down: So far, as of `MayBeDown`; they do not count.
        setting: Where the time limit is set, for messages.
    """

    def __init__(self, max_running: int, timeout_s: float, seconds_down: Callable[[], float], setting: str) -> None:
        self._free = max_running
        self._timeout_s = timeout_s
        self._seconds_down = seconds_down
        self._setting = setting
        self._waiting: deque[Job[T]] = deque()
        # In the order in which they began: as they have one limit in common, the first reaches it first.
        self._running: dict[asyncio.Task[T], Job[T]] = {}
        self._timed_out: dict[asyncio.Task[T], Job[T]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, job: Job[T]) -> None:
        """Run this job when there is a place for it; called on the event loop."""
        self._waiting.append(job)
        self._fill_places()

    async def end(self, jobs: Iterable[Job[T]]) -> None:
        """Cancel those that run and wait for them. Raises RunFailedError naming one that goes on."""
        running = {job.task: job for job in jobs if job.task is not None and not job.task.done()}
        if not running:
            return
        for task in running:
            task.cancel()
        limit = concurrency.CANCEL_TIMEOUT_S
        await asyncio.wait(running, timeout=limit)
        for task, job in running.items():
            if not task.done():
                raise concurrency.still_runs(job.what, limit)

    def _fill_places(self) -> None:
        while self._free and self._waiting:
            job = self._waiting.popleft()
            if not job.is_wanted:
                continue
            self._free -= 1
            loop = asyncio.get_running_loop()
            job.began = self._clock()
            job.task = loop.create_task(job.run())
            self._running[job.task] = job
            job.task.add_done_callback(self._end_of)
            if self._timer is None:
                self._timer = loop.call_later(self._timeout_s, self._watch)

    def _end_of(self, task: asyncio.Task[T]) -> None:
        """A task is done."""
        # Retrieved, so that asyncio does not tell again what is raised on the way out of a task nobody waits for.
        error = None if task.cancelled() else task.exception()
        if job := self._running.pop(task, None):
            if task.cancelled():
                # As a CancelledError it would end the run without a word, and it was not this run's doing.
                error = AttemptFailedError(f"{job.what} was cancelled from within.")
            self._tell(job, task.result() if error is None else None, error)
        elif job := self._timed_out.pop(task, None):
            text = f"{job.what} did not end within {self._timeout_s:g} s ({self._setting})."
            self._tell(job, None, AttemptFailedError(text))

    def _tell(self, job: Job[T], result: T | None, error: BaseException | None) -> None:
        """Tell a job of its end, and give its place to another."""
        self._free += 1
        # Neither its result nor, where it goes on, the task is anything to wait for.
        job.task = None
        job.ended(result, error)
        self._fill_places()
        if not self._running and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        """Cancel what has reached its time limit, and come again when the next one may have."""
        now, self._timer = self._clock(), None
        late: list[asyncio.Task[T]] = []
        left = 0.0
        for task, job in self._running.items():
            left = job.began + self._timeout_s - now
            if left > 0:
                break
            if not task.done():
                late.append(task)
        loop = asyncio.get_running_loop()
        for task in late:
            self._timed_out[task] = self._running.pop(task)
            task.cancel()
            loop.call_later(concurrency.CANCEL_TIMEOUT_S, self._tell_of_stuck, task)
        if self._running:
            # Without an engine the rest stays as it is, however small.
            self._timer = loop.call_later(max(left, _TICK_S), self._watch)

    def _tell_of_stuck(self, task: asyncio.Task[T]) -> None:
        """A task that was cancelled at its time limit has had the time to end."""
        if task in self._timed_out and not task.done():
            job = self._timed_out.pop(task)
            self._tell(job, None, concurrency.still_runs(job.what, concurrency.CANCEL_TIMEOUT_S))

    def _clock(self) -> float:
        """Seconds that count against time limits: those in which an engine could generate."""
        return asyncio.get_running_loop().time() - self._seconds_down()
