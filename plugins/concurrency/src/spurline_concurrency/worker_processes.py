"""The child of a `KillablePool`, which imports a function once and forks itself into workers that call it.

The child has one thread, and runs no user code except the import. Forking is therefore safe, and the child can always
kill workers. When the pool closes a worker's channel, the child kills the worker and all processes that the worker has
started.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import faulthandler
import gc
import io
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from spurline.errors import ConfigError, DataError, ModelError, PluginError, RunFailedError, SpurlineError, UserError
from spurline_concurrency.calls import AttemptFailedError, is_async, located
from spurline_concurrency.child import Parent, end_with, kill_group

Outcome = tuple[str, Any]
"""Either `value` and the function's result, or the name of an error and its message (problems, for a ConfigError)."""
Function = Callable[..., Any]

SPURLINE_ERRORS = (AttemptFailedError, ConfigError, DataError, ModelError, PluginError, RunFailedError, UserError)
"""Errors that the pool raises again if a worker raises them. A subclass is raised as its base class."""
_POLL_MS = 20
"""Milliseconds between two looks for channels that the pool has closed, and for processes that have ended."""
_END_S = 5.0
"""Seconds that `end` waits for all processes to end."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class WorkerSettings:
    """Settings that a pool passes to its child. `KillablePool` describes the settings that are not listed here.

    Attributes:
        python_path: PYTHONPATH of the run's process.
        files: One or two file descriptors. The first is a socket. Each message on it asks for a worker, and brings the
            worker's end of a channel. The second is the run's standard error, which gets the output of calls.
    """

    function: str
    argument: str | None
    timeout_s: float
    import_timeout_s: float
    memory_bytes: int
    python_path: str | None
    files: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the function in messages."""
        return self.argument or self.function

    @property
    def late(self) -> str:
        """Return the message of a call that exceeds the time limit."""
        return f"The function {self.name} did not return within {self.timeout_s:g} s."


def main(parent: Parent) -> None:
    """Fork workers until the pool closes the socket of its requests or dies."""
    settings = WorkerSettings(**json.loads(parent.arguments[0]))
    # This process has its own PYTHONPATH. Programs that a call starts must get the PYTHONPATH of the run.
    os.environ.pop("PYTHONPATH", None)
    if settings.python_path is not None:
        os.environ["PYTHONPATH"] = settings.python_path
    # This limit counts private memory only. CUDA reserves far more addresses than it uses.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = settings.memory_bytes if hard == resource.RLIM_INFINITY else min(settings.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    # If the import hangs, this prints the traceback and ends the process.
    faulthandler.dump_traceback_later(settings.import_timeout_s, exit=True)
    try:
        found: Function = resolve_name(settings.function)
        function = found if settings.argument is None else found(settings.argument)
    except SpurlineError as error:
        parent.send({"ready": _failure(error, settings)})
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to every caller
        why = f"A worker process cannot import {settings.name}: {type(error).__name__}: {error}."
        parent.send({"ready": ("PluginError", why)})
        return
    faulthandler.cancel_dump_traceback_later()
    if sys.platform == "linux":
        # Linux must not kill this process when the pool's process ends: the socket of requests is then closed, and this
        # process first kills everything that calls have started. Orphaned processes become its children.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A garbage collection would write to the imported objects, and so copy the memory that forks share.
    gc.freeze()
    # Otherwise every fork would print the output that is still in the buffer.
    sys.stdout.flush()
    supervisor = _Supervisor(settings, function)
    # Writing fails if the pool's process has died.
    with suppress(BrokenPipeError):
        parent.send({"ready": ("value", is_async(function))})
        supervisor.run()
    supervisor.end()


class _Supervisor:
    """Forks workers, kills them, and waits for all processes that end."""

    def __init__(self, settings: WorkerSettings, function: Function) -> None:
        self._settings, self._function = settings, function
        self._workers: dict[int, socket.socket] = {}
        """The channel of each worker, by process id."""
        # Processes that the import has started are not killed before the end, because calls may need them.
        self._kept = _children()
        self._kills_orphans = False
        requests, *self._output = settings.files
        self._requests = socket.socket(fileno=requests)

    def run(self) -> None:
        """Fork and kill workers until the pool closes the socket. In a worker, serve calls and raise SystemExit."""
        while True:
            if _has_event(self._requests, select.POLLIN, _POLL_MS):
                _, files, *_ = socket.recv_fds(self._requests, 1, 1)
                if not files:
                    return
                self._fork(socket.socket(fileno=files[0]))
            for pid, channel in self._workers.items():
                # With event mask 0, poll reports only that the pool has closed the other end.
                if _has_event(channel, 0):
                    kill_group(pid)
            self._reap()
            if self._kills_orphans:
                # A killed process may leave further processes, which become children of this process when it ends.
                self._kills_orphans = _kill_all(_children() - self._workers.keys() - self._kept)

    def end(self) -> None:
        """Kill every worker, and all processes that workers and the import have started."""
        deadline = time.monotonic() + _END_S
        while _kill_all(_children() | self._workers.keys()) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.001)

    def _fork(self, channel: socket.socket) -> None:
        supervisor = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _send_end(channel, f"it could not be started: {error}")
            return
        if pid == 0:
            self._leave(supervisor)
            with suppress(BrokenPipeError):
                _serve(channel, self._function, self._settings)
            sys.exit()
        self._workers[pid] = channel

    def _leave(self, supervisor: int) -> None:
        """Close the supervisor's files in a fork, and make the fork end with the supervisor."""
        # The processes that the fork starts belong to its group, and are killed with the group.
        os.setpgid(0, 0)
        end_with(supervisor)
        for each in (self._requests, *self._workers.values()):
            each.close()
        # The standard input is the channel of the parent's messages, which a call must not read.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        for output in self._output:
            os.dup2(output, 1)
            os.dup2(output, 2)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # The process may be killed at any time, and output in its buffer would be lost.
            sys.stdout.reconfigure(line_buffering=True)
        # If memory runs out, Linux ends this process before the run's process. Other systems do not have this file.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")

    def _reap(self) -> None:
        """Wait for all processes that have ended, and kill the groups of workers among them."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                channel = self._workers.pop(pid, None)
                if channel is not None:
                    self._kills_orphans = True
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
                    _send_end(channel, f"exit code {os.waitstatus_to_exitcode(status)}")


def _has_event(channel: socket.socket, events: int, wait_ms: int = 0) -> bool:
    # Unlike `select.select`, this takes file descriptors above 1023.
    poll = select.poll()
    poll.register(channel, events)
    return bool(poll.poll(wait_ms))


def _kill_all(pids: set[int]) -> bool:
    """Kill these processes with their groups. Returns whether there are any."""
    for pid in pids:
        kill_group(pid)
    return bool(pids)


def _send_end(channel: socket.socket, how: str) -> None:
    """Tell the pool how a worker has ended. The first newline ends a line that the worker has not finished."""
    with channel, suppress(OSError):
        channel.sendall(b"\n" + json.dumps({"ended": how}).encode() + b"\n")


def _children() -> set[int]:
    """Return the children of this process, or no children if the system has no such list."""
    with suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()


# The functions below run in a worker.


def _serve(channel: socket.socket, function: Function, settings: WorkerSettings) -> None:
    """Make calls until the pool closes its end. Async calls run at the same time, plain calls one after another."""
    if is_async(function):
        asyncio.run(_serve_side_by_side(channel, function, settings))
        return
    with channel.makefile("rb") as calls:
        for line in calls:
            number, _, packed = line.partition(b" ")
            try:
                answer = _line(number, ("value", function(*_arguments(packed))))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the caller
                answer = _line(number, _failure(error, settings))
            channel.sendall(answer)


async def _serve_side_by_side(channel: socket.socket, function: Function, settings: WorkerSettings) -> None:
    channel.setblocking(False)
    # The pool is trusted, so its lines may have any length.
    calls, answers = await asyncio.open_connection(sock=channel, limit=1 << 40)
    tasks: set[asyncio.Task[None]] = set()

    async def make(number: bytes, packed: bytes) -> None:
        limit = asyncio.timeout(settings.timeout_s)
        try:
            async with limit:
                # If the call ignores that it is cancelled, it gets no answer, and the pool kills this process.
                answer = _line(number, ("value", await function(*_arguments(packed))))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - told to the caller
            answer = _line(number, _failure(error, settings))
        answers.write(_line(number, ("TookTooLong", settings.late)) if limit.expired() else answer)

    while line := await calls.readline():
        number, _, packed = line.partition(b" ")
        task = asyncio.ensure_future(make(number, packed))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _arguments(packed: bytes) -> Any:
    # The run's own process has pickled them.
    return pickle.loads(base64.b64decode(packed))  # noqa: S301


def _failure(error: BaseException, settings: WorkerSettings) -> Outcome:
    if isinstance(error, MemoryError):
        limit_gb = settings.memory_bytes / 2**30
        return "TookTooLong", f"The function {settings.name} took more than memory_gb: {limit_gb:g}."
    if not isinstance(error, SpurlineError):
        return "AttemptFailedError", f"{settings.name} failed: {located(error)}"
    kind = next((kind for kind in SPURLINE_ERRORS if isinstance(error, kind)), RunFailedError)
    problems = [(problem.key, problem.message) for problem in error.problems] if isinstance(error, ConfigError) else []
    return kind.__name__, problems or str(error)


def _line(number: bytes, outcome: Outcome) -> bytes:
    return json.dumps({"id": int(number), "outcome": outcome}, default=_number).encode() + b"\n"


def _number(value: Any) -> Any:
    """Return a numpy or torch number as a Python number."""
    if getattr(value, "shape", None) != ():
        raise TypeError(f"its result is of type {type(value).__name__}, which JSON cannot hold")
    return value.item()
