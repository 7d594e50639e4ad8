"""Run the server, a process that imports all slow modules once and then forks the ranks of this machine.

For each rank the controller sends a connection and a log file over a socket. The server answers with the id of the new
process, and later reports the exit code of the process. Every rank has a process session of its own, so that only the
controller handles Ctrl-C. Linux kills the server when the controller dies, and the ranks when the server dies.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from spurline.child import Parent, end_with, kill_group
from spurline_ranks.outcomes import packed
from spurline_ranks.rank_main import RankMain

PID_BYTES = 8
_PRELOADED = ("torch", "transformers")


def main(parent: Parent) -> None:
    control, *modules = parent.arguments
    for module in (*_PRELOADED, *modules):
        importlib.import_module(module)
    parent.send({"ready": True})
    files = _serve(parent, socket.socket(fileno=int(control)))
    # `_serve` returns files only in a fork, which becomes a rank.
    if files is not None:
        _be_a_rank(*files)


def _serve(parent: Parent, control: socket.socket) -> tuple[int, int] | None:
    """Fork ranks until the controller is gone.

    Returns:
        In a forked rank, the file descriptors of its connection and its log. In the server, None.
    """
    # A job scheduler sends these signals to all processes of a job. Only the controller handles them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    server, ranks = os.getpid(), set[int]()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(1 << 16)
                _reap(ranks, parent)
            if control not in ready:
                continue
            asked, files, _, _ = socket.recv_fds(control, 1, 2)
            if not asked:
                return None
            if (pid := os.fork()) == 0:
                break
            ranks.add(pid)
            control.send(pid.to_bytes(PID_BYTES))
            for file in files:
                os.close(file)
    os.setsid()
    end_with(server)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in (woken, wake, control, parent):
        end.close()
    connection, log = files
    return connection, log


def _reap(ranks: set[int], parent: Parent) -> None:
    for pid in list(ranks):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        # This also ends processes that the rank has started.
        kill_group(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ranks.remove(pid)
        parent.send({"pid": pid, "code": code})


def _be_a_rank(connection: int, log: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    # On this signal a rank writes its stacks, even while it hangs in C code.
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    _Rank(Connection(connection)).serve()


class _Rank:
    """A rank with its end of the connection. It kills itself when the controller closes the other end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        environment, sys.path[:], folder, order = connection.recv()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        self._main = RankMain(order)

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="connection", daemon=True).start()
        self._say(self._main.start())
        while True:
            self._say(self._main.call(*self._calls.get()))

    def _listen(self) -> None:
        """Receive calls and questions about the rank's work. Kill this process when the controller is gone."""
        try:
            while True:
                method, common = self._connection.recv()
                if method is None:
                    self._say(packed(self._main.doing()))
                else:
                    own = self._connection.recv()
                    self._calls.put((method, (*own, *common)))
        except (EOFError, OSError):
            pass
        except Exception:  # noqa: BLE001 - it becomes the last words of this process
            traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, message: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(message)
