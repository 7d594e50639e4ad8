"""Run functions that may hang, such as environments and rewards, with time limits, on the event loop and on threads.

A thread cannot be killed. If its caller is cancelled or times out, the thread is abandoned: it keeps running, and its
result is dropped. It is a daemon thread, so the process can still end. If too many threads of a function are abandoned,
its next call waits until some have ended. Code that must be stoppable belongs in a separate process. A task on the
event loop can be cancelled. Its caller then waits until the task has ended, or gets an error that names the task.
"""

from __future__ import annotations

import asyncio
import math
import sys
import sysconfig
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from spurline.errors import RunFailedError, SpurlineError
from spurline.plugins.official import OFFICIAL
from spurline.threads import call_on_daemon

T = TypeVar("T")

CANCEL_TIMEOUT_S = 30.0
"""Seconds that a cancelled attempt may take to end."""
MAX_ABANDONED = 64
"""Largest number of abandoned threads of one function. Each of them takes memory and processor time."""
_LOOK_S = 1.0
"""Seconds between two checks whether abandoned threads of a function have ended."""
_TICK_S = 0.1
"""Shortest time in seconds between two checks of the time limits."""

_LIBRARIES = ("<frozen", *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")))
"""Prefixes of the file names of code that the user did not write."""
_OURS = ("spurline", "spurline_concurrency", *(f"spurline_{plugin}" for plugin in OFFICIAL))
"""Names of Spurline's packages, which may also be installed in place. Plugins of others are user code."""


class AttemptFailedError(SpurlineError):
    """One attempt failed, but another attempt may succeed."""


def located(error: BaseException) -> str:
    """Describe an exception and the line that raised it: `KeyError: 'unit' (rewards.py:12 in grade)`.

    The line is the innermost line of user code, or the innermost line of all if the traceback has no user code.
    """
    every = traceback.extract_tb(error.__traceback__)
    packages = filter(None, map(sys.modules.get, _OURS))
    ours = (f"{folder}/" for module in packages for folder in getattr(module, "__path__", ()))
    prefixes = (*_LIBRARIES, *ours)
    frames = [frame for frame in every if not frame.filename.startswith(prefixes)] or every
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


async def in_thread(function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
    """Call the function on a new thread, and return its result or raise its exception. Cancelling abandons the thread.

    While MAX_ABANDONED abandoned threads of this function run, no thread is started. This wait has no time limit.
    """
    left = _abandoned[_name_of(function)]
    while len(left) >= MAX_ABANDONED:
        left[:] = [call for call in left if not call.done()]
        if len(left) >= MAX_ABANDONED:
            await asyncio.sleep(_LOOK_S)

    def call() -> tuple[T, None] | tuple[None, Exception]:
        # An error is returned, because asyncio would replace some errors by its own, without their traceback.
        try:
            return function(*arguments, **keywords), None
        except Exception as error:  # noqa: BLE001 - raised below
            return None, error
        except BaseException as error:  # noqa: BLE001 - `sys.exit()` in a reward or tool must not end the run
            return None, RuntimeError(f"it raised {type(error).__name__}({error})")

    done = call_on_daemon(f"call-{getattr(function, '__name__', 'function')}", call)
    try:
        # The thread cannot be stopped, so a cancellation must not reach the future that the thread will set.
        value, error = await asyncio.shield(asyncio.wrap_future(done))
    except asyncio.CancelledError:
        left.append(done)
        raise
    if error is not None:
        raise error
    return cast("T", value)


_abandoned: defaultdict[tuple[str, str], list[Future[Any]]] = defaultdict(list)
"""Futures of abandoned threads, by module and name of their function."""


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
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
    """Return whether `function` is an async function or an object with an async `__call__`."""
    return asyncio.iscoroutinefunction(function) or asyncio.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def end_tasks(tasks: Iterable[asyncio.Future[Any]], what: str, timeout_s: float | None = None) -> None:
    """Cancel the tasks that still run and wait for them.

    Args:
        tasks: All tasks, including tasks that have already ended.
        what: Name of the tasks in the error.
        timeout_s: Seconds to wait; CANCEL_TIMEOUT_S by default. For tasks inside an attempt, pass less than the attempt
            itself may take to end, so that the error names these tasks and not the attempt.

    Raises:
        RunFailedError: If a task still runs after `timeout_s`.
    """
    limit = CANCEL_TIMEOUT_S if timeout_s is None else timeout_s
    everything = list(tasks)
    running = [task for task in everything if not task.done()]
    for task in running:
        # A cancelled task may be waiting for its own work to end. A second cancel would end that wait.
        if not (isinstance(task, asyncio.Task) and task.cancelling()):
            task.cancel()
    stuck = (await asyncio.wait(running, timeout=limit))[1] if running else set[asyncio.Future[Any]]()
    for task in everything:
        # Read all exceptions. asyncio would log unread ones, which would hide the first error.
        _ = task.done() and (task.cancelled() or task.exception())
    if stuck:
        raise _still_runs(what, limit)


def _still_runs(what: str, limit_s: float) -> RunFailedError:
    return RunFailedError(
        f"{what} was cancelled, but still runs {limit_s:g} s later. An environment must let "
        "asyncio.CancelledError pass."
    )


async def all_or_none(
    coroutines: Sequence[Coroutine[Any, Any, T]], what: str, timeout_s: float | None = None
) -> list[T]:
    """Return all results in order. After an error, cancel the other coroutines, wait for them, and raise the error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_tasks(tasks, what, timeout_s)
        # The traceback of an error refers to this frame, and the frame would keep the tasks alive.
        tasks.clear()


TimeLimit = tuple[float, str]
"""Seconds that a call may take, and the name of the setting that says so, for messages."""


@dataclass(eq=False, slots=True)
class Call(Generic[T]):
    """A call that `Places` runs. It has no future of its own, since its caller waits for many calls at once.

    Attributes:
        what: Name of the call in messages.
        work: Makes the coroutine. If the call is over before it begins, `work` is not called.
        on_end: Called on the event loop when the call has a result or an error.
        limit: The seconds that the call may take, and the setting of this limit.
        is_over: Whether the call has a result or an error, or nobody waits for it any more.
        error: The error of a call that has failed.
        task: The task that makes the call; None before the call begins and after it has ended.
        end: The end of the time limit, on the clock of `Places`, which stands still while no engine can generate.
        is_late: Whether the call was cancelled because it was late.
    """

    what: str
    work: Callable[[], Coroutine[Any, Any, T]]
    on_end: Callable[[Call[T]], None]
    limit: TimeLimit
    is_over: bool = False
    error: BaseException | None = None
    task: asyncio.Task[T] | None = None
    end: float = 0.0
    is_late: bool = False
    _result: T | None = None

    def result(self) -> T:
        """Return the result of a call that is over, or raise its error."""
        assert self.is_over, f"{self.what} has not ended"
        if self.error is not None:
            raise self.error
        return cast("T", self._result)

    def finish(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Note the result or the error, unless the call is over."""
        if not self.is_over:
            self.is_over, self._result, self.error = True, result, error
            self.on_end(self)


class Places:
    """Runs a limited number of coroutines at a time, each with a time limit. They begin in the order of `start`.

    Tens of thousands may run, so each takes only one task, and one timer serves all of them.

    Args:
        count: Largest number of coroutines that run at the same time.
        timeout_s: Seconds that a coroutine without its own limit may take after it has begun.
        seconds_down: Returns the total number of seconds so far in which no engine could generate. The time limit does
            not count these seconds.
        setting: Name of the setting that sets the time limit, for messages.
    """

    def __init__(self, count: int, timeout_s: float, seconds_down: Callable[[], float], setting: str) -> None:
        self._num_free = count
        self._limit = timeout_s, setting
        self._seconds_down = seconds_down
        self._waiting: deque[Call[Any]] = deque()
        self._running: dict[asyncio.Task[Any], Call[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_end = math.inf
        """The earliest end that the timer waits for."""

    def start(
        self,
        what: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        on_end: Callable[[Call[T]], None],
        limit: TimeLimit | None = None,
    ) -> Call[T]:
        """Call `work()` as soon as fewer than `count` coroutines run. Every call must be passed to `end` later.

        The call's error is that of the coroutine; AttemptFailedError if the coroutine takes too long or is cancelled by
        its own code; or RunFailedError if it still runs after it was cancelled.
        """
        call = Call(what, work, on_end, limit or self._limit)
        self._waiting.append(call)
        self._fill()
        return call

    async def end(self, calls: Sequence[Call[Any]], what: str) -> None:
        """Cancel the calls that have not ended, and wait for them. Raises RunFailedError if one still runs."""
        for call in calls:
            call.is_over = True
        if running := [call.task for call in calls if call.task is not None]:
            await end_tasks(running, what)

    def _fill(self) -> None:
        while self._num_free and self._waiting:
            call = self._waiting.popleft()
            if call.is_over:
                continue
            self._num_free -= 1
            call.end = self._clock() + call.limit[0]
            call.task = asyncio.get_running_loop().create_task(call.work())
            self._running[call.task] = call
            call.task.add_done_callback(self._take)
            if call.end < self._next_end:
                self._end_late()

    def _take(self, task: asyncio.Task[Any]) -> None:
        """Give the result of a task to its call, and the place to another call."""
        # Read the error, because asyncio would log an unread error.
        error = None if task.cancelled() else task.exception()
        if (call := self._running.pop(task, None)) is None:
            return
        # The traceback of an error refers to frames that would keep the task alive.
        call.task = None
        self._num_free += 1
        if call.is_late:
            seconds, setting = call.limit
            call.finish(error=AttemptFailedError(f"{call.what} did not end within {seconds:g} s ({setting})."))
        elif task.cancelled():
            # A CancelledError would end the run without a message.
            call.finish(error=AttemptFailedError(f"{call.what} was cancelled by its own code."))
        elif error is not None:
            call.finish(error=error)
        else:
            call.finish(task.result())
        self._fill()

    def _end_late(self) -> None:
        """Cancel the coroutines that have reached their time limit. Set the timer for the next coroutine."""
        if self._timer is not None:
            self._timer.cancel()
        now, loop = self._clock(), asyncio.get_running_loop()
        self._timer, self._next_end = None, math.inf
        for task, call in self._running.items():
            if call.is_late:
                continue
            if call.end > now:
                self._next_end = min(self._next_end, call.end)
                continue
            call.is_late = True
            task.cancel()
            loop.call_later(CANCEL_TIMEOUT_S, self._give_up, call)
        if self._next_end < math.inf:
            self._timer = loop.call_later(max(self._next_end - now, _TICK_S), self._end_late)

    def _give_up(self, call: Call[Any]) -> None:
        """Fail a call that still runs although it was cancelled, and give its place to another call."""
        if call.task is not None:
            del self._running[call.task]
            call.task = None
            self._num_free += 1
            call.finish(error=_still_runs(call.what, CANCEL_TIMEOUT_S))
            self._fill()

    def _clock(self) -> float:
        """Return the time in seconds, without the seconds in which no engine could generate."""
        return asyncio.get_running_loop().time() - self._seconds_down()
