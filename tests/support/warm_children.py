"""Child processes that begin where the imports end: one process has imported everything, and is forked.

Half a dozen seconds of CPU that an engine or a worker spends on importing torch and transformers are no part of what
most tests are about. All else is as `ChildProcess` has it: a child of this process, in a session of its own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

MODULES = ("spurline_async_rl.engines.child.main",)
"""Those that are forked; others start as ever."""
IMPORTED = ("torch", "torch._dynamo", "transformers", "transformers.models.qwen3.modeling_qwen3", *MODULES)
_PR_SET_CHILD_SUBREAPER = 36


class WarmChild:
    """A `subprocess.Popen` of such a module, as far as `ChildProcess` uses that."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._ended = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._ended], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout_s or 0.0)
            os.close(self._ended)
            try:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                # Somebody else has waited for it; `subprocess` says the same then.
                self._code = 0
        return self._code


class WarmChildren:
    """Stands in for the module `subprocess` in `spurline.child`. The process that is forked starts with the
    first child."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    @property
    def Popen(self) -> dict[type, Any]:
        return {bytes: self._start}

    def close(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(60)

    def _start(self, command: list[str], **options: Any) -> WarmChild | subprocess.Popen[bytes]:
        # COMMAND -P -m spurline.child MODULE ...
        module = command[4]
        if module not in MODULES or options["pass_fds"]:
            return subprocess.Popen(command, **options)
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        order = {"arguments": command[4:], "environment": options["env"], "folder": os.getcwd()}
        with self._lock:
            control = self._opened()
            _adopt(True)
            socket.send_fds(control, [json.dumps(order).encode()], [theirs_in, theirs_out, options["stderr"].fileno()])
            pid = int(control.recv(100))
            _adopt(False)
        os.close(theirs_in)
        os.close(theirs_out)
        return WarmChild(pid, os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb"))

    def _opened(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno())],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        return self._control


class ForkedChildren(WarmChildren):
    """The same in a process that has imported everything itself: what is forked for the children is a fork of it.

    To be made while that process has no threads, and after `prepare` in it or in what it is a fork of.
    """

    @staticmethod
    def prepare() -> None:
        _import_all()

    def __init__(self) -> None:
        super().__init__()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            return
        self._control.close()
        if (order := serve(theirs)) is None:
            os._exit(0)
        become(order)
        os._exit(0)


def find_room_for_titles() -> None:
    """Look for it before the imports: less is found once a library has changed the environment."""
    importlib.import_module("setproctitle").getproctitle()


def _import_all() -> None:
    find_room_for_titles()
    for name in IMPORTED:
        importlib.import_module(name)


def _adopt(on: bool) -> None:
    """Whether grandchildren whose parent ends become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every order, in a process without threads, which a fork would lose. Returns again in each fork, with
    its order; None at the end."""
    _import_all()
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    # The allocator of pyarrow has one, and handles forks.
    assert len(threads) - threads.count("jemalloc_bg_thd") == 1, threads
    # Forks share what is never collected.
    gc.freeze()
    tests = os.getppid()
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not message:
            return None
        if between := os.fork():
            os.waitpid(between, 0)
            for file in files:
                os.close(file)
            continue
        if os.fork():
            os._exit(0)
        while os.getppid() != tests:
            # It ended meanwhile, so that nobody adopts.
            if _has_ended(tests):
                os._exit(1)
            time.sleep(0.001)
        os.setsid()
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        control.send(str(os.getpid()).encode())
        control.close()
        return json.loads(message)


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def become(order: dict[str, Any]) -> None:
    from setproctitle import setproctitle

    from spurline import child

    setproctitle(" ".join([sys.executable, "-P", "-m", child.__name__, *order["arguments"]]))
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[:0] = order["environment"]["PYTHONPATH"].split(os.pathsep)
    child._main(*order["arguments"])


if __name__ == "__main__":
    if (order := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        become(order)
