"""Call a function in worker processes that are killed when it takes too long.

For code that may hang inside a library, where no thread can be stopped. Arguments and results travel as JSON lines,
never as pickles. What a worker does is in `worker_process`.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

from spurline.errors import PluginError, RunFailedError
from spurline.protocols.environment import AttemptFailedError

START_TIMEOUT_S = 120.0
"""Seconds a worker may take to import its function."""
EXIT_TIMEOUT_S = 30.0
"""Seconds a killed worker may take to be gone."""
_STDERR_BYTES = 2000


class TookTooLong(Exception):  # noqa: N818 - a finding about one call, for the caller to judge
    """The call exceeded its limit of time or memory."""


class _WorkerDied(Exception):  # noqa: N818 - turned into an error that names the function
    """The process ended by itself."""


class _Process:
    """A running worker process: send lines, receive lines, kill."""

    def __init__(self, function: str) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        self._popen = subprocess.Popen(
            # -P: a module in the working directory must not hide one of the same name elsewhere.
            [sys.executable, "-P", "-m", "spurline.rl.rewards.worker_process", function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            # Ctrl-C in a terminal is the parent's to handle.
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="worker-replies", daemon=True)
        self._reader.start()

    def send(self, message: Any) -> None:
        assert self._popen.stdin is not None
        # A dead process cannot be written to; the next `receive` finds that out and says why.
        with suppress(OSError, ValueError):
            self._popen.stdin.write(json.dumps(message).encode() + b"\n")
            self._popen.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, or None when none came in time. Raises _WorkerDied."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if line:
            return json.loads(line)
        code = self._popen.wait(timeout=EXIT_TIMEOUT_S)
        raise _WorkerDied(f"exit code {code}. {self._last_words()}".strip())

    def kill(self) -> None:
        """End the process; harmless when it has ended."""
        self._popen.kill()
        self._popen.wait(timeout=EXIT_TIMEOUT_S)
        self._reader.join(timeout=EXIT_TIMEOUT_S)
        for stream in (self._popen.stdin, self._popen.stdout, self._stderr):
            # Closing flushes what a dead process can no longer read.
            with suppress(BrokenPipeError):
                stream.close()  # pyright: ignore[reportOptionalMemberAccess]

    def _read(self) -> None:
        """Queue lines as they come; an empty one says that there are no more."""
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _last_words(self) -> str:
        if self._stderr.closed:
            return ""
        self._stderr.seek(0)
        return self._stderr.read()[-_STDERR_BYTES:].decode(errors="replace").strip()


class KillableWorker:
    """One worker process, started at the first call and again after it ended. One call at a time.

    function: `module:function`; JSON-able arguments and result.
    """

    def __init__(self, function: str, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._process: _Process | None = None

    def call(self, *arguments: Any) -> Any:
        """The function's result. Raises TookTooLong, AttemptFailedError when it raises or its process dies."""
        process = self._process = self._process or self._start()
        process.send(arguments)
        reply = self._receive(process, self._timeout_s)
        if reply is None:
            self.close()
            raise TookTooLong(f"{self._function} took longer than {self._timeout_s:g} s")
        if "memory" in reply:
            raise TookTooLong(f"{self._function} ran out of memory")
        if "error" in reply:
            raise AttemptFailedError(f"{self._function} failed: {reply['error']}")
        return reply["value"]

    def close(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _start(self) -> _Process:
        process = self._process = _Process(self._function)
        ready = self._receive(process, START_TIMEOUT_S)
        if ready is None:
            self.close()
            raise RunFailedError(f"A worker process did not import {self._function} within {START_TIMEOUT_S:g} s.")
        if "error" in ready:
            self.close()
            raise PluginError(f"A worker process cannot import {self._function}: {ready['error']}.")
        return process

    def _receive(self, process: _Process, timeout_s: float) -> dict[str, Any] | None:
        try:
            return process.receive(timeout_s)
        except _WorkerDied as error:
            self.close()
            raise AttemptFailedError(f"The worker process of {self._function} died: {error}") from error


class WorkerPool:
    """Several workers for the same function, for calls from any thread."""

    def __init__(self, function: str, timeout_s: float, workers: int) -> None:
        self._all = [KillableWorker(function, timeout_s) for _ in range(workers)]
        self._closed = False
        # Last in, first out: no second process starts as long as the first one keeps up.
        self._idle: queue.LifoQueue[KillableWorker] = queue.LifoQueue()
        for worker in reversed(self._all):
            self._idle.put(worker)
        self._longest_call_s = START_TIMEOUT_S + timeout_s + EXIT_TIMEOUT_S

    def call(self, *arguments: Any) -> Any:
        """As `KillableWorker.call`, on the next free worker; RunFailedError once the pool is closed."""
        worker = self._next()
        try:
            self._check_open()
            return worker.call(*arguments)
        finally:
            if self._closed:
                # The call may have started the process anew after `close` had been here.
                worker.close()
            self._idle.put(worker)

    def close(self) -> None:
        """Kill every process. Calls under way fail, those that wait for a worker too."""
        self._closed = True
        for worker in self._all:
            worker.close()

    def _next(self) -> KillableWorker:
        """A free worker. Every call ahead of this one has its limit, so that the wait has an end."""
        while True:
            self._check_open()
            with suppress(queue.Empty):
                return self._idle.get(timeout=self._longest_call_s)

    def _check_open(self) -> None:
        if self._closed:
            raise RunFailedError("The pool of worker processes is closed.")
