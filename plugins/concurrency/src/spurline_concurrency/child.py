"""Run a Python module in a child process that exchanges messages with this process and cannot outlive it.

The parent uses `ChildProcess`, which starts the child, passes messages both ways, notices when the child ends, and can
kill it together with all processes that it started. The child's `main` function gets a `Parent`. A message is one line
of JSON on the child's standard input or output, followed by its values of type `bytes`. This module unpickles nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from spurline.errors import RunFailedError
from spurline.files import own_file
from spurline.importing import importing, own_process

Message = Mapping[str, Any]
"""JSON values by name. The values themselves, but not their parts, may also be `bytes`."""

EXIT_TIMEOUT_S = 30.0
"""Seconds a process may take to end by itself after it has closed its output. After that it is killed."""
KILL_TIMEOUT_S = 30.0
"""Seconds that a process may take to end after it was killed."""

_LAST_WORDS_BYTES = 3000
_PR_SET_PDEATHSIG = 1
_ATTACHED = "spurline.attached"
"""Key under which a message on the pipe lists the names and sizes of its values of type `bytes`."""


class ChildProcess:
    """A child process that runs the function `main(parent)` of a module. Raises OSError if it cannot be started.

    `take` and `on_end` are called on a thread of this object, and must not block.

    Args:
        module: Name of the module.
        arguments: Values that the child receives as text, in `Parent.arguments`.
        take: Called with each list of messages that arrived together from the child.
        on_end: Called once with this object, after the process has ended and `take` has received all its messages.
        log: File to which the child's standard error is appended. If None, only `last_words` shows that output.
        environment: Environment variables for the child. They are added to the variables of this process.
        pass_fds: File descriptors that the child inherits.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[object] = (),
        *,
        take: Callable[[list[Any]], object],
        on_end: Callable[[ChildProcess], object],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.exit_code: int | None = None
        """Exit code of the process, or None while it runs. It is negative if a signal killed the process."""
        self._take, self._on_end = take, on_end
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._log = tempfile.TemporaryFile() if log is None else open(log, "ab+", opener=own_file)  # noqa: SIM115 - closed by `last_words`
        # The log may hold the output of an earlier process.
        self._log_start = os.fstat(self._log.fileno()).st_size
        self._log_lock = threading.Lock()
        self._end_of_log = self._trouble = ""
        start = partial(
            subprocess.Popen[bytes],
            # With -P, a module in the working directory cannot hide an installed module of the same name.
            [sys.executable, "-P", "-m", __name__, module, *map(str, (os.getpid(), *arguments))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path),
                **(environment or {}),
            },
            # The child leads its own group of processes, all of which are killed together. Ctrl-C does not reach it.
            start_new_session=True,
            pass_fds=pass_fds,
        )
        started: Future[subprocess.Popen[bytes]] = Future()
        self._reader = threading.Thread(target=self._live, args=(start, started), name=f"child-{module}", daemon=True)
        self._reader.start()
        self.pid = started.result().pid
        self._writer = threading.Thread(target=self._write, name=f"child-{module}", daemon=True)
        self._writer.start()

    @property
    def how_it_ended(self) -> str:
        """Return how the process ended, such as `exit code 3`, or an empty string while it runs."""
        if self._trouble or self.exit_code is None:
            return self._trouble
        if self.exit_code < 0:
            number = -self.exit_code
            # Real-time signals have no names of their own.
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return f"killed by {name}"
        return f"exit code {self.exit_code}"

    def last_words(self) -> str:
        """Return the last text that the process wrote to standard error."""
        with self._log_lock:
            if not self._log.closed:
                has_ended, log = self.exit_code is not None, self._log.fileno()
                start = max(self._log_start, os.fstat(log).st_size - _LAST_WORDS_BYTES)
                self._end_of_log = os.pread(log, _LAST_WORDS_BYTES, start).decode(errors="replace").strip()
                if has_ended:
                    self._log.close()
            return self._end_of_log

    def send(self, message: Message) -> None:
        """Queue a message for the process. If the process has ended, the message is lost."""
        self._outbox.put(_encode(message))

    def close_input(self) -> None:
        """Close the process's input after all queued messages. The process handles these messages, and then ends."""
        self._outbox.put(None)

    def kill(self) -> None:
        """Kill the process and all processes that it started. Do nothing if it has ended."""
        if self.exit_code is None:
            kill_group(self._process.pid)

    def end(self, patience_s: float = 0.0) -> None:
        """Close the process's input, wait up to `patience_s` for the process to end, then kill it.

        Do not call this from `take` or `on_end`. A second call is harmless. Raises RunFailedError if killing fails.
        """
        self.close_input()
        self._reader.join(patience_s)
        self.kill()
        for thread in (self._reader, self._writer):
            thread.join(KILL_TIMEOUT_S)
        if self._reader.is_alive():
            raise RunFailedError(f"Process {self.pid} was killed, but has not ended {KILL_TIMEOUT_S:g} s later.")

    def _live(self, start: Callable[[], subprocess.Popen[bytes]], started: Future[subprocess.Popen[bytes]]) -> None:
        """Start the process, pass its messages to `take`, and wait until it ends.

        This thread must live as long as the process: Linux kills a child when the thread that started it ends.
        """
        try:
            self._process = start()
        except BaseException as error:  # noqa: BLE001 - `__init__` raises it
            self._log.close()
            started.set_exception(error)
            return
        started.set_result(self._process)
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            try:
                for messages in _messages(pipe.fileno()):
                    self._take(messages)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(EXIT_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - `how_it_ended` reports the error
                self._trouble = f"its messages cannot be read: {type(error).__name__}: {error}"
        # Kill the processes that the child left running.
        self.kill()
        self.exit_code = self._process.wait()
        self.last_words()
        self._outbox.put(None)
        self._on_end(self)

    def _write(self) -> None:
        assert self._process.stdin is not None
        # Writing fails if the process has ended.
        with suppress(OSError), self._process.stdin as pipe:
            while (line := self._outbox.get()) is not None:
                pipe.write(line)
                pipe.flush()


class Parent:
    """The child's connection to its parent process. The `main` function of the child's module receives it."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        # Output of libraries goes to standard error, so that it does not mix with the messages.
        self._out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._lock = threading.Lock()
        # The parent notices the end of this process by the end of the pipe, which a fork must not keep open.
        os.register_at_fork(after_in_child=self._leave)

    def send(self, *messages: Message) -> None:
        """Send messages to the parent, all in one write."""
        with self._lock:
            self._out.write(b"".join(map(_encode, messages)))
            self._out.flush()

    def messages(self) -> Iterator[list[Any]]:
        """Yield lists of messages that arrived together, until the parent closes the pipe or dies."""
        return _messages(0)

    def _leave(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._out.fileno())
        os.close(nowhere)


def end_with(parent: int) -> None:
    """Make Linux kill this process when the process with the id `parent` dies, even if this process hangs.

    Linux also does so when only the thread that started this process ends, and the parent lives on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent was gone before this process began")


def kill_group(leader: int) -> None:
    """Kill all processes of the group that `leader` leads. Do nothing if they have ended.

    Call this before waiting for the leader. After the wait, another process may get the same id.
    """
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # The process was just forked and leads no group yet. Or it has ended: some systems then raise PermissionError.
        with suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)


def _encode(message: Message) -> bytes:
    attached = {name: value for name, value in message.items() if isinstance(value, bytes)}
    plain = {name: value for name, value in message.items() if name not in attached}
    if attached:
        plain[_ATTACHED] = {name: len(value) for name, value in attached.items()}
    return b"".join([json.dumps(plain, separators=(",", ":")).encode(), b"\n", *attached.values()])


def _messages(pipe: int) -> Iterator[list[Any]]:
    """Yield lists of messages that arrived together. A message that a killed sender left incomplete is dropped."""
    # Do not read sys.stdin: if a thread holds the lock of sys.stdin while it reads, the interpreter crashes on exit.
    received = bytearray()
    while part := os.read(pipe, 1 << 20):
        received += part
        messages: list[Any] = []
        begin = 0
        while end := received.find(b"\n", begin) + 1:
            message = json.loads(received[begin:end])
            attached = message.pop(_ATTACHED, {})
            if end + sum(attached.values()) > len(received):
                break
            for name, size in attached.items():
                message[name] = bytes(received[end : end + size])
                end += size
            messages.append(message)
            begin = end
        del received[:begin]
        if messages:
            yield messages


def _main(module: str, parent: str, *arguments: str) -> None:
    end_with(int(parent))
    me = Parent(list(arguments))
    own_process()
    with importing():
        main = importlib.import_module(module).main
    main(me)


if __name__ == "__main__":
    _main(*sys.argv[1:])
