"""The process that ranks of this machine are forked from; it has imported what is slow to import, nothing else.

The controller hands it a connection and a log for each rank over a socket, and gets told its process and how it has
ended. Every rank has a session of its own, so that Ctrl-C stays the controller's to handle, and is killed by Linux when
this process dies, which is killed when the controller dies.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from spurline.child import Parent, end_with
from spurline_ranks.outcomes import Raised
from spurline_ranks.rank_main import RankMain

COMMAND = struct.Struct("<cI")
"""One command of the controller: what, and the number of a rank. Ranks are numbered in the order of their start."""
FORK, KILL, STACKS = b"f", b"k", b"t"
"""FORK comes with two open files, the rank's connection and its log."""

_PRELOADED = ("torch", "transformers")


def main(parent: Parent) -> None:
    control, *modules = parent.arguments
    for module in (*_PRELOADED, *modules):
        importlib.import_module(module)
    parent.send({"ready": True})
    files = _Server(parent, socket.socket(fileno=int(control))).serve()
    # Only in a fork: here ends the server, and a rank begins.
    if files is not None:
        _be_a_rank(*files)


class _Server:
    def __init__(self, parent: Parent, control: socket.socket) -> None:
        self._parent, self._control = parent, control
        self._num_started = 0
        self._pids: dict[int, int] = {}
        # What systems send to all processes when they stop a job is the controller's to handle.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> tuple[int, int] | None:
        """Obey until the controller is gone. Returns a second time in each rank: its connection and log."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._woken in ready:
                    os.read(self._woken, 1 << 16)
                    self._reap()
                if self._control in ready:
                    command, files, _, _ = socket.recv_fds(self._control, COMMAND.size, 2)
                    if not command:
                        return None
                    if (mine := self._obey(command, files)) is not None:
                        return mine

    def _obey(self, command: bytes, files: list[int]) -> tuple[int, int] | None:
        what, number = COMMAND.unpack(command)
        if what == FORK:
            return self._start(*files)
        if (pid := self._pids.get(number)) is not None:
            if what == KILL:
                _kill(pid)
            else:
                os.kill(pid, signal.SIGUSR1)
        return None

    def _start(self, connection: int, log: int) -> tuple[int, int] | None:
        server = os.getpid()
        pid = os.fork()
        if pid:
            self._pids[self._num_started] = pid
            self._parent.send({"started": self._num_started, "pid": pid})
            self._num_started += 1
            os.close(connection)
            os.close(log)
            return None
        os.setsid()
        end_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for file in (self._woken, self._wake):
            os.close(file)
        self._control.close()
        self._parent.close()
        return connection, log

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # What the rank has started; its group cannot be another's as long as the rank is not waited for.
            _kill(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            del self._pids[number]
            self._parent.send({"ended": number, "code": code})


def _kill(pid: int) -> None:
    """A rank and what it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # It has been forked only now and has no group yet, or is over.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _be_a_rank(connection: int, log: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    # The stacks of a rank that stands still, even where Python cannot run.
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    _Rank(Connection(connection)).serve()


class _Rank:
    """A rank at its end of the connection. It lives as long as the other end is open."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        process: Mapping[str, Any] = connection.recv()
        os.environ.clear()
        os.environ.update(process["environment"])
        sys.path[:] = process["path"]
        os.chdir(process["folder"])
        self._main = RankMain(process["order"])

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="connection", daemon=True).start()
        self._say(("outcome", self._main.start()))
        while True:
            method, arguments = self._calls.get()
            outcome = self._main.call(method, arguments)
            try:
                self._say(("outcome", outcome))
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                # Nothing was sent: a message is pickled first.
                error.add_note(f"The answer of `{method}` is no plain data.")
                self._say(("outcome", Raised.of(error)))

    def _listen(self) -> None:
        """Take calls and questions. A controller that is gone leaves nobody to work for, whatever the rank does."""
        try:
            while True:
                method, common = self._connection.recv()
                if method is None:
                    self._say(("doing", self._main.doing()))
                else:
                    own = self._connection.recv()
                    self._calls.put((method, (*own, *common)))
        except (EOFError, OSError):
            pass
        except Exception:  # noqa: BLE001 - it becomes the last words of this process
            traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, message: tuple[str, Any]) -> None:
        with self._lock:
            self._connection.send(message)
