"""The child of a `KillablePool`: imports a function once, and has it called in forks of itself that can be killed.

Place on the way: the pool, in the run's process -> this process, which hands out calls and watches their limits -> a
fork that makes the call (`forked_calls`) -> back. This process has one thread and calls nothing of the user's but the
import, so that it is always there to kill, and safe to fork. What a fork has started ends with it.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from spurline.child import Parent, end_with
from spurline.errors import SpurlineError
from spurline_rl.concurrency import is_async
from spurline_rl.rewards.forked_calls import GRACE_S, Outcome, Worker, told

_FEWEST_WORKERS, _MOST_WORKERS = 4, 16
"""Bounds of the default number of workers, which is that of the processors: where these are few, calls may still wait
side by side, and where they are many, the trainer wants them."""
_LONGEST_WAIT_S = 3600.0
"""Seconds that a selector is asked to wait at a time; it takes no number that is very large."""
_END_TIMEOUT_S = 5.0
"""Seconds to see every worker gone after it was killed."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class WorkerSettings:
    """What a pool tells its child.

    function: `module:function`, or what `adapter` takes. adapter: `module:function` that makes the function of it.
    imports: modules to import before. timeout_s: seconds of one call. import_timeout_s: of the import.
    workers: at most; 0 is the default. memory_bytes: private memory of one process. output: file descriptor for what
    calls print; None keeps it for the last words. python_path: PYTHONPATH of the run's process.
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
    """Take calls until the pool closes its end."""
    settings = WorkerSettings(**json.loads(parent.arguments[0]))
    # What a call starts must not look for its modules where this process has to.
    os.environ.pop("PYTHONPATH", None)
    if settings.python_path is not None:
        os.environ["PYTHONPATH"] = settings.python_path
    _limit_memory(settings.memory_bytes)
    # Says where the import stands, and ends the process.
    faulthandler.dump_traceback_later(settings.import_timeout_s, exit=True)
    function, problem = _load(settings)
    faulthandler.cancel_dump_traceback_later()
    if sys.platform == "linux":
        # From here on the end of the input tells of the parent's end, so that there is time to kill what calls started;
        # what has lost its parent becomes a child of this process.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Forks share what has been imported as long as no collection touches it.
    gc.freeze()
    # What has been printed must not be in the buffer of every fork.
    sys.stdout.flush()
    workers, worker = _Workers(parent, settings, function, problem), None
    try:
        # The parent has died when it cannot be written to.
        with suppress(BrokenPipeError):
            workers.run()
        workers.end()
    except _InWorkerError as fork:
        worker = fork.worker
    # Not in the handler: what a call raises would be told as raised during another error.
    if worker is not None:
        worker.serve()


def _load(settings: WorkerSettings) -> tuple[Callable[..., Any] | None, Outcome | None]:
    """The function, or what is wrong with it."""
    try:
        for module in settings.imports:
            importlib.import_module(module)
        if settings.adapter:
            return resolve_name(settings.adapter)(settings.function), None
        return resolve_name(settings.function), None
    except SpurlineError as error:
        return None, told(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to every caller
        return None, ("unknown", f"{type(error).__name__}: {error}")


def default_workers() -> int:
    """Number of worker processes where none is given."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(_FEWEST_WORKERS, min(_MOST_WORKERS, processors))


@dataclass
class _Call:
    """line: as it came, and as it goes to a worker. deadline: by the monotonic clock, once a worker has it."""

    number: int
    line: bytes
    deadline: float = 0.0


class _InWorkerError(Exception):
    """Raised in a fork, to leave what belongs to the parent."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker


@dataclass(eq=False)
class _Process:
    """A worker, as the parent sees it. running_call: shared memory, the number of the call whose code runs, from 1."""

    pid: int
    channel: socket.socket
    running_call: memoryview
    lines: _Lines
    calls: dict[int, _Call] = field(default_factory=dict)
    unsent: bytearray = field(default_factory=bytearray)
    killed: Literal["", "late", "stuck"] = ""
    """Why it was killed: a call took too long, or one that had been answered did not let itself be cancelled."""


class _Workers:
    """Hands calls out to forks of this process, started as they are needed, and answers each once."""

    def __init__(
        self, parent: Parent, settings: WorkerSettings, function: Callable[..., Any] | None, problem: Outcome | None
    ) -> None:
        self._parent, self._settings, self._function, self._problem = parent, settings, function, problem
        self._is_async = function is not None and is_async(function)
        self._grace_s = min(GRACE_S, settings.timeout_s) if self._is_async else 0.0
        self._limit = settings.workers or (1 if self._is_async else default_workers())
        self._processes: dict[int, _Process] = {}
        self._waiting: deque[_Call] = deque()
        self._answers: list[Mapping[str, Any]] = []
        self._selector = selectors.DefaultSelector()
        self._is_open = True
        self._input = _Lines(0)
        # A signal says that a child has ended: its own end of a pipe may live on in what it has started.
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._wake_end = wake
        # Of the import, which every call may rely on.
        self._kept = _children()

    def run(self) -> None:
        """Until the parent closes its end. Raises _InWorkerError in a fork."""
        self._parent.send({"ready": self._problem or ("value", None)})
        self._selector.register(0, selectors.EVENT_READ, self._take_calls)
        self._selector.register(self._wake, selectors.EVENT_READ, self._reap)
        while self._is_open:
            for key, _ in self._selector.select(self._seconds_left()):
                key.data()
            self._kill_late()
            self._hand_out()
            if self._answers:
                self._parent.send(*self._answers)
                self._answers.clear()

    def end(self) -> None:
        """Kill every worker with all that it has started."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        self._answers.clear()
        for process in self._processes.values():
            _kill(process.pid)
        while self._processes and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.001)
        # What a worker has left is this process's only now that it is gone.
        while (left := _children()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            self._reap()
            time.sleep(0.001)

    def _seconds_left(self) -> float | None:
        # One that was killed may take its time to end, where it waits for a disk or gives back much memory.
        deadlines = [
            next(iter(process.calls.values())).deadline
            for process in self._processes.values()
            if process.calls and not process.killed
        ]
        return min(_LONGEST_WAIT_S, max(0.0, min(deadlines) - time.monotonic())) if deadlines else None

    def _take_calls(self) -> None:
        lines = self._input.read()
        if lines is None:
            self._is_open = False
            return
        cancelled: set[int] = set()
        for line in lines:
            message = json.loads(line)
            if "cancel" in message:
                cancelled.add(message["cancel"])
            elif self._problem is not None:
                self._answer(message["id"], self._problem)
            else:
                self._waiting.append(_Call(message["id"], line + b"\n"))
        if cancelled:
            # At once: a run that ends many attempts takes thousands back.
            self._waiting = deque(call for call in self._waiting if call.number not in cancelled)

    def _hand_out(self) -> None:
        while self._waiting:
            process = min(self._processes.values(), key=_load_of, default=None)
            if process is None or (process.calls and len(self._processes) < self._limit):
                try:
                    process = self._fork()
                except OSError as error:
                    if process is None:
                        self._answer(self._waiting.popleft().number, ("failed", f"no process can be started: {error}"))
                        continue
            if process is None or (process.calls and not self._is_async):
                return
            call = self._waiting.popleft()
            call.deadline = time.monotonic() + self._settings.timeout_s + self._grace_s
            process.calls[call.number] = call
            process.unsent += call.line
            self._send(process)

    def _send(self, process: _Process) -> None:
        # A worker that is gone is noticed where its end is.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while process.unsent:
                del process.unsent[: process.channel.send(process.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
        self._selector.modify(process.channel, events, lambda: self._serve(process))

    def _serve(self, process: _Process) -> None:
        if process.channel.fileno() < 0:
            # It was seen to have ended among the same events.
            return
        if process.unsent:
            self._send(process)
        lines = process.lines.read()
        if lines is None:
            # It can answer no more, whether it has ended or closed what was not its own to close.
            _kill_group(process.pid)
            return
        for line in lines:
            answer = json.loads(line)
            if "stuck" in answer:
                process.killed = process.killed or "stuck"
                _kill(process.pid)
            elif process.calls.pop(answer["id"], None) is not None:
                self._answers.append(answer)

    def _fork(self) -> _Process:
        ours, theirs = socket.socketpair()
        running_call = memoryview(mmap.mmap(-1, 8)).cast("q")
        forker = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._leave(forker)
            assert self._function is not None
            raise _InWorkerError(Worker(theirs, self._function, self._settings.timeout_s, running_call))
        theirs.close()
        ours.setblocking(False)
        process = self._processes[pid] = _Process(pid, ours, running_call, _Lines(ours.fileno()))
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._serve(process))
        return process

    def _leave(self, forker: int) -> None:
        """In a fork: let go of what is the forker's, and be one that can be ended."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A group of its own: what it starts is killed with it.
        os.setpgid(0, 0)
        end_with(forker)
        self._selector.close()
        for descriptor in (self._wake, self._wake_end):
            os.close(descriptor)
        for process in self._processes.values():
            process.channel.close()
        self._parent.close()
        # A call that reads the standard input must not take the messages.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        # Another debugger, set by PYTHONBREAKPOINT or by the module, may need no terminal.
        if sys.breakpointhook is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = _no_debugger
        if self._settings.output is not None:
            for stream in (1, 2):
                os.dup2(self._settings.output, stream)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A process that may be killed at any time leaves nothing in a buffer.
            sys.stdout.reconfigure(line_buffering=True)
        # Where memory runs out, Linux ends this process before the run's; only where there is such a file.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")

    def _kill_late(self) -> None:
        now = time.monotonic()
        for process in self._processes.values():
            # In the order in which they were sent, with one limit: the first is the first to be late.
            first = next(iter(process.calls.values()), None)
            if first is not None and first.deadline <= now and not process.killed:
                process.killed = "late"
                _kill(process.pid)

    def _reap(self) -> None:
        """See to the workers that have ended, and kill what they have left."""
        with suppress(BlockingIOError):
            os.read(self._wake, 1 << 16)
        ended_any = False
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                process = self._processes.pop(ended[0], None)
                if process is not None:
                    self._clear(process, os.waitstatus_to_exitcode(ended[1]))
                ended_any = True
        if ended_any:
            for pid in _children() - self._processes.keys() - self._kept:
                _kill(pid)

    def _clear(self, process: _Process, exit_code: int) -> None:
        """Answer for the calls of a worker that is gone."""
        _kill_group(process.pid)
        # What it said before it ended counts.
        self._serve(process)
        self._selector.unregister(process.channel)
        process.channel.close()
        now = time.monotonic()
        running = process.running_call[0] - 1
        guilty = set(process.calls)
        if running in process.calls:
            guilty = {running}
        elif process.killed == "late":
            guilty = {number for number, call in process.calls.items() if call.deadline <= now}
        elif process.killed == "stuck":
            guilty = set[int]()
        for number in guilty:
            self._answer(number, ("late", None) if process.killed == "late" else ("died", exit_code))
        # The others only shared the process: they are made again.
        self._waiting.extendleft(reversed([call for call in process.calls.values() if call.number not in guilty]))

    def _answer(self, number: int, outcome: Outcome) -> None:
        self._answers.append({"id": number, "outcome": outcome})


class _Lines:
    """Whole lines of a descriptor, as far as they have come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun: list[bytes] = []

    def read(self) -> list[bytes] | None:
        """None at the end."""
        try:
            part = os.read(self._descriptor, 1 << 20)
        except (BlockingIOError, ConnectionResetError):
            return []
        if not part:
            return None
        whole, end, rest = part.rpartition(b"\n")
        lines = b"".join([*self._begun, whole]).split(b"\n") if end else []
        if end:
            self._begun = []
        self._begun.append(rest)
        return lines


def _limit_memory(limit: int) -> None:
    """Limit the memory that is this process's alone: not files that are mapped, nor addresses that are only reserved,
    as CUDA does with more than any machine has."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _no_debugger(*_: Any, **_keywords: Any) -> None:
    raise EOFError("breakpoint() needs a terminal, which a reward function has with `in_process: true` alone")


def _children() -> set[int]:
    """Of this process, which has one thread; empty where the system does not tell."""
    with suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()


def _kill(child: int) -> None:
    """A child that has not been waited for, and its group where it leads one."""
    _kill_group(child)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    # The group is gone, or was never made.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _load_of(process: _Process) -> int:
    return len(process.calls)
