"""One child process: a module of Python that runs beside this process and cannot outlive it.

Both ends are here. `ChildProcess` starts the module, passes messages both ways, notices its death, and ends it with
all that it has started; the module's `main` gets a `Parent`. A message is a JSON object, one a line, on the child's
standard input or output: never a pickle, since a process must not run what it was sent.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import queue
import shutil
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
from spurline.importing import importing

Message = Mapping[str, Any]

EXIT_TIMEOUT_S = 30.0
"""Seconds a process may take to end by itself after it has closed its output; then it is killed."""
KILL_TIMEOUT_S = 30.0
"""Seconds a process may take to be gone after it was killed."""

_LAST_WORDS_BYTES = 3000
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """The function `main(parent)` of a module, in a process of its own. Raises OSError when it cannot be started.

    take: is called with the messages that came together. on_end: is called once, with this object, when the process has
    ended and everything it said was taken. Both are called on a thread of this object, and return soon.
    log: the file that its standard error is added to; None keeps it for `last_words` only.
    folder: is removed by the child when this process dies, as nobody else could. Such a child gets no messages.
    environment: is added to that of this process. pass_fds: open files that the child has under the same numbers.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[object] = (),
        *,
        take: Callable[[list[Any]], object],
        on_end: Callable[[ChildProcess], object],
        log: Path | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.exit_code: int | None = None
        """Exit code of the process: None as long as it runs, negative if a signal killed it."""
        self._take, self._on_end = take, on_end
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._log = tempfile.TemporaryFile() if log is None else open(log, "ab+", opener=own_file)  # noqa: SIM115 - closed by `last_words`
        self._log_lock = threading.Lock()
        self._end_of_log = self._trouble = ""
        start = partial(
            subprocess.Popen[bytes],
            # -P: a module in the working directory must not hide one of the same name elsewhere.
            [sys.executable, "-P", "-m", __name__, module, *map(str, (os.getpid(), folder or "", *arguments))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path),
                **(environment or {}),
            },
            # A group of its own: what it starts ends with it, and Ctrl-C in a terminal is this process's to handle.
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
        """Such as `exit code 3`, once it has ended."""
        if self._trouble or self.exit_code is None:
            return self._trouble
        if self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        return f"exit code {self.exit_code}"

    def last_words(self) -> str:
        """Return the end of its standard error."""
        with self._log_lock:
            if not self._log.closed:
                has_ended, log = self.exit_code is not None, self._log.fileno()
                start = max(0, os.fstat(log).st_size - _LAST_WORDS_BYTES)
                self._end_of_log = os.pread(log, _LAST_WORDS_BYTES, start).decode(errors="replace").strip()
                if has_ended:
                    self._log.close()
            return self._end_of_log

    def send(self, message: Message) -> None:
        """Returns at once; what a dead process is sent is lost, as `on_end` says."""
        self._outbox.put(_encode(message))

    def close_input(self) -> None:
        """There will be no more messages, so that it ends by itself when it has dealt with those it has."""
        self._outbox.put(None)

    def kill(self) -> None:
        """The process and what it has started; harmless when it has ended."""
        if self.exit_code is None:
            kill_group(self._process.pid)

    def end(self, patience_s: float = 0.0) -> None:
        """Returns when it has ended, killed unless it ends by itself within `patience_s`. May be called again, but not
        from `take` or `on_end`. Raises RunFailedError for a process that cannot be killed."""
        self.close_input()
        self._reader.join(patience_s)
        self.kill()
        for thread in (self._reader, self._writer):
            thread.join(KILL_TIMEOUT_S)
        if self._reader.is_alive():
            raise RunFailedError(f"Process {self.pid} was killed, but has not ended {KILL_TIMEOUT_S:g} s later.")

    def _live(self, start: Callable[[], subprocess.Popen[bytes]], started: Future[subprocess.Popen[bytes]]) -> None:
        """Start it, take what it says, and see it end. Linux kills it when the thread that started it ends, so that
        this must be the one that lives as long."""
        try:
            self._process = start()
        except BaseException as error:  # noqa: BLE001 - raised where it is started
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
            except Exception as error:  # noqa: BLE001 - not swallowed: it is how the process ended
                self._trouble = f"its messages cannot be read: {type(error).__name__}: {error}"
        # Also what it has left running.
        self.kill()
        self.exit_code = self._process.wait()
        self.last_words()
        self._outbox.put(None)
        self._on_end(self)

    def _write(self) -> None:
        assert self._process.stdin is not None
        # A dead process cannot be written to.
        with suppress(OSError), self._process.stdin as pipe:
            while (line := self._outbox.get()) is not None:
                pipe.write(line)
                pipe.flush()


class Parent:
    """The process that started this one, for the `main` of its module."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        # What a library prints must not get between the messages.
        self._out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, *messages: Message) -> None:
        """Several go in one write."""
        with self._lock:
            self._out.write(b"".join(map(_encode, messages)))
            self._out.flush()

    def close(self) -> None:
        """Close the pipe in a fork of this process, which has nothing to say to the parent and must not hold it."""
        self._out.close()

    def messages(self) -> Iterator[list[Any]]:
        """Yield the messages of the parent, as many as came together, until it closes its end or dies."""
        return _messages(0)


def end_with(parent: int) -> None:
    """Let Linux kill this process when its parent, of this id, dies: nothing else is of use while a computation hangs.

    More exactly, when that thread of the parent ends which has started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent was gone before this process began")


def kill_group(leader: int) -> None:
    """Kill a process that leads a group of its own, and all that it has started there; harmless when they are gone.

    Call it before the leader is waited for: until then the number of the group cannot be another's.
    """
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # It has been forked only now and leads no group yet, or has ended, which some systems answer in this way.
        with suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)


def _encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _messages(pipe: int) -> Iterator[list[Any]]:
    """Whole lines, as many as came together. A last one that was not finished says nothing: its sender was killed."""
    # Not sys.stdin: its lock, held by a thread that reads, would break the end of the interpreter.
    begun: list[bytes] = []
    while part := os.read(pipe, 1 << 20):
        whole, end, rest = part.rpartition(b"\n")
        if end:
            yield [json.loads(line) for line in b"".join([*begun, whole]).split(b"\n")]
            begun.clear()
        begun.append(rest)


def _remove_with_parent(folder: str) -> None:
    """Wait for the end of the parent, which closes our standard input; then remove the folder and end."""
    for _ in _messages(0):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _main(module: str, parent: str, folder: str, *arguments: str) -> None:
    if folder:
        threading.Thread(target=_remove_with_parent, args=(folder,), daemon=True).start()
    else:
        end_with(int(parent))
    me = Parent(list(arguments))
    with importing():
        main = importlib.import_module(module).main
    main(me)


if __name__ == "__main__":
    _main(*sys.argv[1:])
