"""The child of a `KillablePool`: imports a function once, and makes calls of it in forks of itself that can be killed.

The pool, in the run's process, sends calls to this process. It hands them to its forks and watches their limits. This
process has one thread and runs no code of the user but the import, so it is always able to kill, and safe to fork. All
processes that a fork has started end with it.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import faulthandler
import gc
import io
import json
import mmap
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import coroutine
from typing import Any

from spurline.child import Parent, end_with, kill_group
from spurline.errors import ConfigError, SpurlineError
from spurline_rl.concurrency import is_async, located

Outcome = tuple[str, Any]
"""`value` and the value, or `late`, `memory`, `failed`, `raised`, `died` or `unknown` and the details."""
Function = Callable[..., Any]

_GRACE_S = 5.0
"""Seconds beyond the time limit after which a worker is killed because it has not answered an async call; at most as
long as the limit. The call blocks the event loop, or does not let itself be cancelled."""
_END_S = 5.0
"""Seconds that all processes may take to be gone at the end."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class WorkerSettings:
    """Settings that a pool hands its child.

    Attributes:
        function: `module:function` that is called, or that returns the function if there is an argument.
        argument: The argument of `function`, or None.
        timeout_s: Seconds of one call.
        import_timeout_s: Seconds of the import.
        workers: The largest number of processes; 0 for the default.
        memory_bytes: Private memory of one process.
        output: File descriptor for the output of calls. If None, the output becomes the child's last words.
        python_path: PYTHONPATH of the run's process.
    """

    function: str
    argument: str | None
    timeout_s: float
    import_timeout_s: float
    workers: int
    memory_bytes: int
    output: int | None
    python_path: str | None


def main(parent: Parent) -> None:
    """Take calls until the pool closes its end or dies."""
    settings = WorkerSettings(**json.loads(parent.arguments[0]))
    # Programs that a call starts must not look for modules where this process has to.
    os.environ.pop("PYTHONPATH", None)
    if settings.python_path is not None:
        os.environ["PYTHONPATH"] = settings.python_path
    # This limits private memory, not addresses that are only reserved, as CUDA does.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = settings.memory_bytes if hard == resource.RLIM_INFINITY else min(settings.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    # Tells where the import hangs, and ends the process.
    faulthandler.dump_traceback_later(settings.import_timeout_s, exit=True)
    try:
        found: Function = resolve_name(settings.function)
        function = found if settings.argument is None else found(settings.argument)
    except SpurlineError as error:
        parent.send({"ready": _told(error)})
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to every caller
        parent.send({"ready": ("unknown", f"{type(error).__name__}: {error}")})
        return
    faulthandler.cancel_dump_traceback_later()
    if sys.platform == "linux":
        # The end of the input tells of the parent's death, which leaves time to kill what calls have started. Processes
        # that lose their parent become children of this process.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Forks share the imported objects as long as no collection touches them.
    gc.freeze()
    # Output must not stay in the buffer of every fork.
    sys.stdout.flush()
    supervisor = _Supervisor(parent, settings, function)
    # The parent has died when it cannot be written to.
    with suppress(BrokenPipeError):
        parent.send({"ready": ("value", None)})
        supervisor.run()
    supervisor.end()


@dataclass(eq=False)
class _Worker:
    """A worker as the supervisor sees it.

    Attributes:
        pid: Its process id.
        channel: The socket of its calls and answers.
        running: Memory that it shares: the call whose code runs, counted from 1, and since when, in nanoseconds of the
            monotonic clock.
        calls: Its calls with their deadlines, by number, in the order in which they were sent.
        is_closed: Whether it has closed its channel. It was killed then, but may not have ended yet.
    """

    pid: int
    channel: socket.socket
    running: memoryview
    calls: dict[int, tuple[bytes, float]] = field(default_factory=dict[int, tuple[bytes, float]])
    unsent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    is_closed: bool = False


class _Supervisor:
    """Hands calls out to forks of this process, started as they are needed, and answers each call once."""

    def __init__(self, parent: Parent, settings: WorkerSettings, function: Function) -> None:
        self._parent, self._settings, self._function = parent, settings, function
        self._is_async = is_async(function)
        self._grace_s = min(_GRACE_S, settings.timeout_s) if self._is_async else 0.0
        self._most = settings.workers or (1 if self._is_async else max(4, min(16, _num_processors())))
        self._workers: dict[int, _Worker] = {}
        self._killed: set[int] = set()
        """Processes that were killed, but have not ended yet."""
        self._waiting: dict[int, bytes] = {}
        self._answers: list[Mapping[str, Any]] = []
        self._received = bytearray()
        # Calls may rely on children of the import.
        self._kept = _children()
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        # A byte arrives here whenever a child ends.
        self._wake, waker = socket.socketpair()
        self._wake.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._wake, selectors.EVENT_READ, self._wake)

    def run(self) -> None:
        """Serve until the parent closes its end. A fork serves its calls in here, and ends with SystemExit."""
        while True:
            for key, events in self._selector.select(self._seconds_left()):
                if key.data is None and not self._take_calls():
                    return
                if key.data is self._wake:
                    self._wake.recv(4096)
                elif key.data is not None:
                    self._serve(key.data, events)
            self._reap()
            self._end_late_workers()
            self._hand_out()
            if self._answers:
                self._parent.send(*self._answers)
                self._answers.clear()

    def end(self) -> None:
        """Kill every worker and all that workers and the import have started."""
        deadline = time.monotonic() + _END_S
        while (left := _children() | self._workers.keys()) and time.monotonic() < deadline:
            for pid in left:
                kill_group(pid)
            with suppress(ChildProcessError):
                while ended := os.waitpid(-1, os.WNOHANG)[0]:
                    self._workers.pop(ended, None)
            time.sleep(0.001)

    def _seconds_left(self) -> float | None:
        deadlines = [deadline for worker in self._workers.values() for _, deadline in [*worker.calls.values()][:1]]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _take_calls(self) -> bool:
        """Take the messages of the pool; False at the end."""
        part = os.read(0, 1 << 20)
        for line in _lines(self._received, part):
            message = json.loads(line)
            if "cancel" in message:
                self._waiting.pop(message["cancel"], None)
            else:
                self._waiting[message["id"]] = line + b"\n"
        return bool(part)

    def _hand_out(self) -> None:
        while self._waiting:
            able = [each for each in self._workers.values() if not each.is_closed]
            worker = min(able, key=lambda each: len(each.calls), default=None)
            if worker is None or (worker.calls and len(able) < self._most):
                try:
                    worker = self._fork()
                except OSError as error:
                    if worker is None:
                        number = next(iter(self._waiting))
                        del self._waiting[number]
                        self._answer(number, ("failed", f"no process can be started: {error}"))
                        continue
            if worker.calls and not self._is_async:
                return
            number = next(iter(self._waiting))
            line = self._waiting.pop(number)
            worker.calls[number] = line, time.monotonic() + self._settings.timeout_s + self._grace_s
            worker.unsent += line
            self._send(worker)

    def _send(self, worker: _Worker) -> None:
        # The death of a worker is noticed when it is reaped.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while worker.unsent:
                del worker.unsent[: worker.channel.send(worker.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self._selector.modify(worker.channel, events, worker)

    def _serve(self, worker: _Worker, events: int) -> None:
        if worker.unsent:
            self._send(worker)
        if events & selectors.EVENT_READ and not self._take_answers(worker):
            # It can answer no more, whether it has ended or closed its channel.
            worker.is_closed = True
            self._selector.unregister(worker.channel)
            kill_group(worker.pid)

    def _take_answers(self, worker: _Worker) -> bool:
        """Take the answers that have come; False if nothing has."""
        part = b""
        with suppress(BlockingIOError, ConnectionResetError):
            part = worker.channel.recv(1 << 20)
        for line in _lines(worker.received, part):
            answer = json.loads(line)
            if worker.calls.pop(answer["id"], None) is not None:
                self._answers.append(answer)
        return bool(part)

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        running = memoryview(mmap.mmap(-1, 16)).cast("q")
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._leave(supervisor)
            with suppress(BrokenPipeError):
                _serve(theirs, self._function, self._settings.timeout_s, running)
            sys.exit()
        theirs.close()
        ours.setblocking(False)
        worker = self._workers[pid] = _Worker(pid, ours, running)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _leave(self, supervisor: int) -> None:
        """Close the supervisor's files in a fork, and make the fork end with the supervisor."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(signal.set_wakeup_fd(-1))
        # The fork has a process group of its own, so that the processes it starts are killed with it.
        os.setpgid(0, 0)
        end_with(supervisor)
        self._selector.close()
        self._wake.close()
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
        # Where memory runs out, Linux ends this process before the run's. Other systems have no such file.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")

    def _end_late_workers(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            # All calls have the same limit, so the first is the first to be late.
            if worker.calls and next(iter(worker.calls.values()))[1] <= now:
                kill_group(worker.pid)
                self._killed.add(worker.pid)
                late = {number for number, (_, deadline) in worker.calls.items() if deadline <= now}
                # A loop is blocked if one step has run for long, not if it is only between two steps of calls that
                # wait. Half of the time is enough, as the worker got the call a bit later.
                is_blocked = now - worker.running[1] / 1e9 >= self._grace_s / 2
                self._remove(worker, self._running_call(worker) if is_blocked else set(), late, ("late", None))

    def _reap(self) -> None:
        """Wait for all processes that have ended, and kill what those that were killed or have died leave behind."""
        leaves_orphans = False
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                worker = self._workers.get(pid)
                leaves_orphans |= worker is not None or pid in self._killed
                self._killed.discard(pid)
                if worker is not None:
                    # Answers that it gave before it ended count.
                    while self._take_answers(worker):
                        pass
                    died = ("died", os.waitstatus_to_exitcode(status))
                    self._remove(worker, self._running_call(worker), set(worker.calls), died)
        if leaves_orphans:
            for pid in _children() - self._workers.keys() - self._killed - self._kept:
                kill_group(pid)
                self._killed.add(pid)

    def _running_call(self, worker: _Worker) -> set[int]:
        return {worker.running[0] - 1} & worker.calls.keys()

    def _remove(self, worker: _Worker, running: set[int], suspects: set[int], outcome: Outcome) -> None:
        """Give the outcome to the call that was running, or else to all suspects. The others are made again."""
        del self._workers[worker.pid]
        if not worker.is_closed:
            self._selector.unregister(worker.channel)
        worker.channel.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        guilty = running or suspects
        for number in guilty:
            self._answer(number, outcome)
        again = {number: line for number, (line, _) in worker.calls.items() if number not in guilty}
        self._waiting = again | self._waiting

    def _answer(self, number: int, outcome: Outcome) -> None:
        self._answers.append({"id": number, "outcome": outcome})


def _lines(received: bytearray, part: bytes) -> list[bytes]:
    """Add a part to the bytes that were received, and take the whole lines out."""
    received += part
    whole, end, _ = received.rpartition(b"\n") if b"\n" in part else (b"", b"", b"")
    del received[: len(whole) + len(end)]
    return bytes(whole).split(b"\n") if end else []


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _children() -> set[int]:
    """Return the children of this process, which has one thread; empty where the system does not tell."""
    with suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()


# In a worker


def _serve(channel: socket.socket, function: Function, timeout_s: float, running: memoryview) -> None:
    """Make calls until the other end is closed: async ones side by side, others one after the other."""
    if is_async(function):
        asyncio.run(_serve_side_by_side(channel, function, timeout_s, running))
        return
    with channel.makefile("rb") as calls:
        for line in calls:
            call = json.loads(line)
            outcome = _outcome(lambda: function(*_arguments(call)))  # noqa: B023 - called at once
            channel.sendall(_line(call["id"], outcome))


async def _serve_side_by_side(
    channel: socket.socket, function: Function, timeout_s: float, running: memoryview
) -> None:
    channel.setblocking(False)
    # Lines may have any length: they are the pool's own.
    calls, answers = await asyncio.open_connection(sock=channel, limit=1 << 40)
    tasks: set[asyncio.Task[None]] = set()

    async def make(call: Mapping[str, Any]) -> None:
        called = asyncio.ensure_future(_noting(function, call, running))
        done, _ = await asyncio.wait({called}, timeout=timeout_s)
        if done:
            outcome = ("failed", "it cancelled itself") if called.cancelled() else _outcome(called.result)
        else:
            outcome = "late", None
            called.cancel()
            # If the call does not let itself be cancelled, it is not answered, and the supervisor kills this process.
            await asyncio.wait({called})
            if not called.cancelled():
                called.exception()
        answers.write(_line(call["id"], outcome))

    while line := await calls.readline():
        task = asyncio.ensure_future(make(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _noting(function: Function, call: Mapping[str, Any], running: memoryview) -> Any:
    try:
        return await _steps(function(*_arguments(call)), running, call["id"] + 1)
    except SystemExit as error:
        # asyncio would end the loop with it.
        raise RuntimeError(f"SystemExit: {error}") from error


@coroutine
def _steps(called: Coroutine[Any, Any, Any], running: memoryview, number: int) -> Generator[Any, Any, Any]:
    """Return the coroutine's result. While its code runs, `running` holds `number` and the time when that began: so the
    supervisor knows which of many calls blocks the event loop."""
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
        except BaseException as error:  # noqa: BLE001 - handed to the coroutine where it waits
            step = partial(called.throw, error)


def _arguments(call: Mapping[str, Any]) -> Any:
    # The run's own process has pickled them.
    return pickle.loads(base64.b64decode(call["arguments"]))  # noqa: S301


def _outcome(call: Callable[[], Any]) -> Outcome:
    try:
        # A result that is not JSON is the function's failure.
        return "value", json.loads(json.dumps(call()))
    except MemoryError:
        return "memory", None
    except SpurlineError as error:
        return _told(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the caller
        return "failed", located(error)


def _told(error: SpurlineError) -> Outcome:
    """Return one of our errors, so that the pool can raise it again."""
    problems = [(problem.key, problem.message) for problem in error.problems] if isinstance(error, ConfigError) else []
    return "raised", [[known.__name__ for known in type(error).__mro__], str(error), problems]


def _line(number: int, outcome: Outcome) -> bytes:
    return json.dumps({"id": number, "outcome": outcome}).encode() + b"\n"
