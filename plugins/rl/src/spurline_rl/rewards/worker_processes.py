"""The child of a `KillablePool`: imports a function once, and has it called in forks of itself that can be killed.

Place on the way: the pool, in the run's process -> this process, which hands out calls and watches their limits -> a
fork that makes the calls -> back, all as lines of JSON. This process has one thread and calls nothing of the user's but
the import, so that it is always there to kill, and safe to fork. What a fork has started ends with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import mmap
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import coroutine
from typing import Any

from spurline.child import Parent, end_with
from spurline.errors import ConfigError, SpurlineError
from spurline_rl.concurrency import is_async, located

Outcome = tuple[str, Any]
"""`value` and the value, or `late`, `memory`, `failed`, `raised`, `died` or `unknown` and what there is to say."""

_FEWEST_WORKERS, _MOST_WORKERS = 4, 16
"""Bounds of the default number of workers, which is that of the processors."""
_GRACE_S = 5.0
"""Seconds beyond the time limit after which an async call that was not answered blocks its event loop, or does not let
itself be cancelled; no longer than the limit itself."""
_LOOK_S = 0.5
"""Seconds between two looks at workers and what they have started, at most."""
_DYING_LOOK_S = 0.01
"""The same as long as something that was killed has not ended."""
_END_S = 5.0
"""Seconds to see everything gone at the end."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class WorkerSettings:
    """Settings that a pool hands its child.

    Attributes:
        function: `module:function`, or what `adapter` takes.
        adapter: `module:function` that makes the function of it, or empty.
        imports: Modules to import before.
        timeout_s: Seconds of one call.
        import_timeout_s: Seconds of the import.
        workers: Processes at most; 0 is the default.
        memory_bytes: Private memory of one process.
        output: File descriptor for what calls print. If None, it goes to the child's last words.
        python_path: PYTHONPATH of the run's process.
    """

    function: str
    adapter: str
    imports: tuple[str, ...]
    timeout_s: float
    import_timeout_s: float
    workers: int
    memory_bytes: int
    output: int | None
    python_path: str | None


def main(parent: Parent) -> None:
    """Take calls until the pool closes its end or dies."""
    settings = WorkerSettings(**json.loads(parent.arguments[0]))
    # What a call starts must not look for its modules where this process has to.
    os.environ.pop("PYTHONPATH", None)
    if settings.python_path is not None:
        os.environ["PYTHONPATH"] = settings.python_path
    # Memory that is this process's alone: not addresses that are only reserved, as CUDA does.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = settings.memory_bytes if hard == resource.RLIM_INFINITY else min(settings.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    # Says where the import stands, and ends the process.
    faulthandler.dump_traceback_later(settings.import_timeout_s, exit=True)
    function, problem = _load(settings)
    faulthandler.cancel_dump_traceback_later()
    if sys.platform == "linux":
        # From here on the end of the input tells of the parent's end, so that there is time to kill what calls started;
        # processes that have lost their parent become children of this one.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Forks share what has been imported as long as no collection touches it.
    gc.freeze()
    # What has been printed must not be in the buffer of every fork.
    sys.stdout.flush()
    supervisor = _Supervisor(parent, settings, function, problem)
    # The parent has died when it cannot be written to.
    with suppress(BrokenPipeError):
        supervisor.run()
    supervisor.end()


def default_workers() -> int:
    """Return the number of worker processes if none is given."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(_FEWEST_WORKERS, min(_MOST_WORKERS, processors))


def _load(settings: WorkerSettings) -> tuple[Callable[..., Any] | None, Outcome | None]:
    """Return the function, or what is wrong with it."""
    try:
        for module in settings.imports:
            importlib.import_module(module)
        if settings.adapter:
            return resolve_name(settings.adapter)(settings.function), None
        return resolve_name(settings.function), None
    except SpurlineError as error:
        return None, _told(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to every caller
        return None, ("unknown", f"{type(error).__name__}: {error}")


@dataclass
class _Call:
    """A call as the pool sent it. `deadline` is set once a worker has it."""

    number: int
    line: bytes
    deadline: float = 0.0


@dataclass(eq=False)
class _Worker:
    """A worker as the supervisor sees it.

    `running` is memory shared with it: the call whose code runs, from 1, and since when, in nanoseconds of the
    monotonic clock. `status` is what it ended with.
    """

    pid: int
    channel: socket.socket
    running: memoryview
    lines: _Lines
    calls: dict[int, _Call] = field(default_factory=dict[int, _Call])
    unsent: bytearray = field(default_factory=bytearray)
    status: int | None = None


class _Supervisor:
    """Hands calls out to forks of this process, started as they are needed, and answers each once."""

    def __init__(
        self, parent: Parent, settings: WorkerSettings, function: Callable[..., Any] | None, problem: Outcome | None
    ) -> None:
        self._parent, self._settings, self._function, self._problem = parent, settings, function, problem
        self._is_async = function is not None and is_async(function)
        self._grace_s = min(_GRACE_S, settings.timeout_s) if self._is_async else 0.0
        self._most = settings.workers or (1 if self._is_async else default_workers())
        self._workers: dict[int, _Worker] = {}
        # Killed, but not ended, which takes its time where one waits for a disk or gives back much memory. With calls
        # to be answered when it is known how it ended.
        self._dying: dict[int, list[_Call]] = {}
        self._waiting: deque[_Call] = deque()
        self._answers: list[Mapping[str, Any]] = []
        self._selector = selectors.DefaultSelector()
        self._input = _Lines(0)
        # Children of the import, which every call may rely on.
        self._kept = _children()

    def run(self) -> None:
        """Serve until the parent closes its end. A fork serves its calls in here, and ends with SystemExit."""
        self._parent.send({"ready": self._problem or ("value", None)})
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._seconds_left()):
                if key.data is None and not self._take_calls():
                    return
                # It may have ended among the same events.
                if key.data is not None and key.data.pid in self._workers:
                    self._serve(key.data)
            self._look_at_workers()
            self._reap()
            self._hand_out()
            if self._answers:
                self._parent.send(*self._answers)
                self._answers.clear()

    def end(self) -> None:
        """Kill every worker with all that it has started, and what the import has started."""
        for worker in list(self._workers.values()):
            self._end(worker, "died")
        self._kept = set()
        deadline = time.monotonic() + _END_S
        while (left := _children() | self._dying.keys()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            self._reap()
            time.sleep(0.001)

    def _seconds_left(self) -> float | None:
        if self._dying:
            return _DYING_LOOK_S
        if not self._workers:
            return None
        deadlines = [call.deadline for worker in self._workers.values() for call in [*worker.calls.values()][:1]]
        # Also while nothing is called: what calls have left may end at any time.
        return min(_LOOK_S, max(0.0, min(deadlines) - time.monotonic())) if deadlines else _LOOK_S

    def _take_calls(self) -> bool:
        """Take what the pool sends; False at the end."""
        lines = self._input.read()
        if lines is None:
            return False
        cancelled: set[int] = set()
        for line in lines:
            message = json.loads(line)
            if "cancel" in message:
                cancelled.add(message["cancel"])
            elif self._problem is not None:
                self._answer(message["id"], self._problem)
            else:
                self._waiting.append(_Call(message["id"], line + b"\n"))
        # All at once: a run that ends many attempts takes thousands back.
        self._waiting = deque(call for call in self._waiting if call.number not in cancelled)
        return True

    def _hand_out(self) -> None:
        while self._waiting:
            worker = min(self._workers.values(), key=lambda each: len(each.calls), default=None)
            if worker is None or (worker.calls and len(self._workers) < self._most):
                try:
                    worker = self._fork()
                except OSError as error:
                    if worker is None:
                        self._answer(self._waiting.popleft().number, ("failed", f"no process can be started: {error}"))
                        continue
            if worker.calls and not self._is_async:
                return
            call = self._waiting.popleft()
            call.deadline = time.monotonic() + self._settings.timeout_s + self._grace_s
            worker.calls[call.number] = call
            worker.unsent += call.line
            self._send(worker)

    def _send(self, worker: _Worker) -> None:
        # A worker that is gone is noticed where its answers are read.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while worker.unsent:
                del worker.unsent[: worker.channel.send(worker.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self._selector.modify(worker.channel, events, worker)

    def _serve(self, worker: _Worker) -> None:
        if worker.unsent:
            self._send(worker)
        lines = worker.lines.read()
        for line in lines or ():
            answer = json.loads(line)
            if worker.calls.pop(answer["id"], None) is not None:
                self._answers.append(answer)
        if lines is None:
            # It can answer no more, whether it has ended or closed what was not its own to close.
            self._end(worker, "died")

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        running = memoryview(mmap.mmap(-1, 16)).cast("q")
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._leave(supervisor)
            assert self._function is not None
            with suppress(BrokenPipeError):
                _serve(theirs, self._function, self._settings.timeout_s, running)
            sys.exit()
        theirs.close()
        ours.setblocking(False)
        worker = self._workers[pid] = _Worker(pid, ours, running, _Lines(ours.fileno()))
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _leave(self, supervisor: int) -> None:
        """Close the supervisor's files in a fork, and make the fork end with the supervisor."""
        # The fork has a process group of its own, so that the processes it starts are killed with it.
        os.setpgid(0, 0)
        end_with(supervisor)
        self._selector.close()
        for worker in self._workers.values():
            worker.channel.close()
        self._parent.close()
        # A call that reads the standard input must not take the messages.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        for stream in (1, 2) if self._settings.output is not None else ():
            os.dup2(self._settings.output or stream, stream)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A process that may be killed at any time leaves nothing in a buffer.
            sys.stdout.reconfigure(line_buffering=True)
        # Where memory runs out, Linux ends this process before the run's; other systems have no such file.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")

    def _look_at_workers(self) -> None:
        """End workers whose calls are late, and see to those that have ended although something holds their channel."""
        now = time.monotonic()
        for worker in list(self._workers.values()):
            # In the order in which they were sent, with one limit: the first is the first to be late.
            first = next(iter(worker.calls.values()), None)
            if first is not None and first.deadline <= now:
                self._end(worker, "late")
                continue
            ended, status = os.waitpid(worker.pid, os.WNOHANG)
            if ended:
                worker.status = status
                # What it said before it ended counts.
                self._serve(worker)
                if worker.pid in self._workers:
                    self._end(worker, "died")

    def _end(self, worker: _Worker, why: str) -> None:
        """Kill a worker with what it has started, and answer for its calls. `why` is `late` or `died`."""
        _kill(worker.pid)
        del self._workers[worker.pid]
        self._selector.unregister(worker.channel)
        worker.channel.close()
        now, running = time.monotonic(), worker.running[0] - 1
        # Then the loop is not only between two steps of calls that wait. Half, as the worker got the call a bit later.
        is_blocked = now - worker.running[1] / 1e9 >= self._grace_s / 2
        guilty = set(worker.calls)
        if running in worker.calls and (why == "died" or is_blocked):
            guilty = {running}
        elif why == "late":
            guilty = {number for number, call in worker.calls.items() if call.deadline <= now}
        # The others only shared the process: they are made again.
        self._waiting.extendleft(reversed([call for call in worker.calls.values() if call.number not in guilty]))
        unanswered = [call for call in worker.calls.values() if call.number in guilty]
        if why == "late":
            for call in unanswered:
                self._answer(call.number, ("late", None))
            unanswered = []
        if worker.status is None:
            self._dying[worker.pid] = unanswered
        else:
            self._clear(unanswered, worker.status)

    def _reap(self) -> None:
        """See to what has ended, without waiting for it: nobody else would be served meanwhile."""
        now = time.monotonic()
        for pid, calls in list(self._dying.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._dying[pid]
                self._clear(calls, status)
            elif calls and calls[0].deadline <= now:
                self._answer_died(calls, signal.SIGKILL)
                self._dying[pid] = []
        # What calls of living workers have left is this process's too, and nobody else waits for it.
        for pid in self._orphans():
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _clear(self, calls: list[_Call], status: int) -> None:
        """Answer for the calls of a process that was killed and has ended, and kill what it has left, which is this
        process's now."""
        self._answer_died(calls, status)
        for pid in self._orphans():
            _kill(pid)
            self._dying[pid] = []

    def _orphans(self) -> set[int]:
        """Return the processes that calls have started and left, which are this process's children now."""
        return _children() - self._workers.keys() - self._dying.keys() - self._kept

    def _answer_died(self, calls: list[_Call], status: int) -> None:
        for call in calls:
            self._answer(call.number, ("died", os.waitstatus_to_exitcode(status)))

    def _answer(self, number: int, outcome: Outcome) -> None:
        self._answers.append({"id": number, "outcome": outcome})


class _Lines:
    """Whole lines of a descriptor, as far as they have come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun = bytearray()

    def read(self) -> list[bytes] | None:
        """Return the lines that have come; None at the end."""
        try:
            part = os.read(self._descriptor, 1 << 20)
        except (BlockingIOError, ConnectionResetError):
            return []
        if not part:
            return None
        self._begun += part
        whole, end, rest = self._begun.rpartition(b"\n") if b"\n" in part else (b"", b"", self._begun)
        self._begun = bytearray(rest)
        return bytes(whole).split(b"\n") if end else []


def _children() -> set[int]:
    """Return the children of this process, which has one thread; empty where the system does not tell."""
    with suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()


def _kill(child: int) -> None:
    """Kill a child that has not been waited for, and its group where it leads one."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)


# In a worker


def _serve(channel: socket.socket, function: Callable[..., Any], timeout_s: float, running: memoryview) -> None:
    """Make calls until the other end is closed: async ones side by side, others one after the other."""
    if is_async(function):
        asyncio.run(_serve_side_by_side(channel, function, timeout_s, running))
        return
    with channel.makefile("rb") as calls:
        for line in calls:
            call = json.loads(line)
            outcome = _outcome(partial(function, *call["arguments"]))
            channel.sendall(_line(call["id"], outcome))


async def _serve_side_by_side(
    channel: socket.socket, function: Callable[..., Any], timeout_s: float, running: memoryview
) -> None:
    channel.setblocking(False)
    # Lines of any length: they are the pool's own.
    calls, answers = await asyncio.open_connection(sock=channel, limit=1 << 40)
    tasks: set[asyncio.Task[None]] = set()

    async def make(number: int, arguments: list[Any]) -> None:
        called = asyncio.ensure_future(_noting(function, arguments, running, number + 1))
        done, _ = await asyncio.wait({called}, timeout=timeout_s)
        if done:
            outcome = ("failed", "it cancelled itself") if called.cancelled() else _outcome(called.result)
        else:
            outcome = "late", None
            called.cancel()
            # A call that does not let itself be cancelled is not answered, and the supervisor kills this process.
            await asyncio.wait({called})
            if not called.cancelled():
                called.exception()
        answers.write(_line(number, outcome))

    while line := await calls.readline():
        call = json.loads(line)
        task = asyncio.ensure_future(make(call["id"], call["arguments"]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _noting(function: Callable[..., Any], arguments: list[Any], running: memoryview, number: int) -> Any:
    try:
        return await _steps(function(*arguments), running, number)
    except SystemExit as error:
        # asyncio would end the loop with it.
        raise RuntimeError(f"SystemExit: {error}") from error


@coroutine
def _steps(called: Coroutine[Any, Any, Any], running: memoryview, number: int) -> Generator[Any, Any, Any]:
    """Return the coroutine's result. `running` holds `number` while its code runs, and since when, so that it is known
    which of many calls blocks the event loop."""
    step = partial(called.send, None)
    while True:
        running[1] = time.monotonic_ns()
        running[0] = number
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
        finally:
            running[0] = 0
        try:
            step = partial(called.send, (yield awaited))
        except BaseException as error:  # noqa: BLE001 - handed in where it waits
            step = partial(called.throw, error)


def _outcome(call: Callable[[], Any]) -> Outcome:
    try:
        # A result that is no JSON is the function's failure.
        return "value", json.loads(json.dumps(call()))
    except MemoryError:
        return "memory", None
    except SpurlineError as error:
        return _told(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the caller
        return "failed", located(error)


def _told(error: SpurlineError) -> Outcome:
    """Return one of our errors, so that it can be raised again on the other side."""
    problems = [(problem.key, problem.message) for problem in error.problems] if isinstance(error, ConfigError) else []
    return "raised", [[known.__name__ for known in type(error).__mro__], str(error), problems]


def _line(number: int, outcome: Outcome) -> bytes:
    return json.dumps({"id": number, "outcome": outcome}).encode() + b"\n"
