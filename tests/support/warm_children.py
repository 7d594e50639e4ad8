"""Processes that begin where the imports end: one process has imported everything, and is forked.

Half a dozen seconds of CPU for importing torch and transformers are no part of what most tests are about. The forks are
engines and workers of `ChildProcess`, workers that `multiprocessing` spawns, and whole commands of `spurline`. Like
those that `subprocess` starts, they are children of the process that asks for them.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import IO, Any

MODULES = ("spurline_async_rl.engines.child_process", "spurline_ranks.rank_main", "sabotaged_child")
"""Modules of `ChildProcess` that are forked. Others start as usual."""
IMPORTED = (
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.models.qwen3.modeling_qwen3",
    "datasets",
    "spurline_collation_fast.tokenization.blocks",
    "spurline_models.adapters.lora",
    *MODULES,
)
_spawn = util.spawnv_passfds
_PR_SET_CHILD_SUBREAPER = 36
_FILES_AT_MOST = 32


class WarmProcess:
    """A fork, with the part of `subprocess.Popen` that callers use."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code, or minus the signal that ended it. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout_s or 0.0)
            os.close(self._ended)
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                # Somebody else has waited for it; `subprocess` says the same then.
                self.returncode = 0
        return self.returncode


class WarmChildren:
    """Stands in for the module `subprocess` in `spurline_concurrency.child`. The process that is forked starts with the
    first order."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    @property
    def Popen(self) -> dict[type, Any]:
        return {bytes: self._start}

    def fork(self, order: dict[str, Any], files: Sequence[int], numbers: Sequence[int] = (0, 1, 2)) -> int:
        """Return the id of a fork that carries out this order with copies of these files.

        numbers: the descriptors that the copies have, by default those of the standard files.
        """
        order = {"numbers": numbers, "environment": dict(os.environ), "folder": os.getcwd(), **order}
        with self._lock:
            control = self._opened()
            _adopt(True)
            socket.send_fds(control, [json.dumps(order).encode()], files)
            pid = int(control.recv(100))
            _adopt(False)
        return pid

    def spawn(self, path: str, command: list[str], files: Sequence[int]) -> int:
        """Stand in for the function of `multiprocessing` that starts processes, all but its tracker of resources."""
        if "--multiprocessing-fork" not in command:
            return _spawn(path, command, files)
        numbers = (0, 1, 2, *files)
        # COMMAND [OPTION ...] -c PROGRAM --multiprocessing-fork
        return self.fork({"program": command[-2], "arguments": command[-1:]}, numbers, numbers)

    def close(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(60)

    def _start(self, command: list[str], **options: Any) -> WarmProcess | subprocess.Popen[bytes]:
        # COMMAND -P -m spurline_concurrency.child MODULE ...
        module = command[4]
        if module not in MODULES:
            return subprocess.Popen(command, **options)
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        order = {"arguments": command[4:], "environment": options["env"]}
        files, passed = [theirs_in, theirs_out, options["stderr"].fileno()], options["pass_fds"]
        pid = self.fork(order, [*files, *passed], [0, 1, 2, *passed])
        os.close(theirs_in)
        os.close(theirs_out)
        return WarmProcess(pid, os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb"))

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
    """The same in a fork, whose children are forks of it.

    To be made while the process has no threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            return
        self._control.close()
        # Ctrl-C of a test is for the process that was forked.
        os.setsid()
        if (order := serve(theirs)) is not None:
            become(order)
        os._exit(0)


class WarmRuns:
    """Starts commands of `spurline` as forks."""

    def __init__(self, children: WarmChildren) -> None:
        self._children = children
        self._started: list[WarmProcess] = []

    def start(
        self, *words: object, output: Path | str = os.devnull, folder: Path | str = ".", warm_children: bool = False
    ) -> WarmProcess:
        """Run `spurline WORDS` with this process's environment.

        Args:
            words: The command.
            output: The file that it writes to.
            folder: Where it runs.
            warm_children: Engines and workers that it starts need no imports either.
        """
        order = {
            "words": [str(word) for word in words],
            "folder": str(Path(folder).absolute()),
            "warm_children": warm_children,
        }
        nothing = os.open(os.devnull, os.O_RDONLY)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY, 0o644)
        self._started.append(WarmProcess(self._children.fork(order, [nothing, file, file])))
        os.close(nothing)
        os.close(file)
        return self._started[-1]

    def close(self) -> None:
        """End what a test that failed has left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(10)


def _import_all() -> None:
    # setproctitle looks for its place in memory, and finds less once a library has changed the environment.
    importlib.import_module("setproctitle").getproctitle()
    spurline = importlib.import_module("spurline")
    own = (module.name for module in pkgutil.walk_packages(spurline.__path__, "spurline."))
    plugins = (f"spurline_{name}.plugin" for name in importlib.import_module("spurline.plugins.official").OFFICIAL)
    for name in (*IMPORTED, *plugins, *(name for name in own if not name.startswith("spurline.testing"))):
        importlib.import_module(name)
    importlib.import_module("config_models").make_those_of_most_runs()


def _import_workers(arguments: Sequence[str]) -> None:
    """Import the modules of workers, `MODULE:CLASS`, that ranks are about to make. Errors are for the ranks."""
    for argument in arguments:
        if ":" in argument and argument.partition(":")[0] not in sys.modules:
            with suppress(ImportError):
                importlib.import_module(argument.partition(":")[0])
            gc.freeze()


def _adopt(on: bool) -> None:
    """Choose whether grandchildren whose parent ends become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every order, in a process without threads, which a fork would lose.

    Returns again in each fork, with its order, and at the end with None.
    """
    _import_all()
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    # The allocator of pyarrow has one, and handles forks.
    assert len(threads) - threads.count("jemalloc_bg_thd") == 1, threads
    # Forks share memory that the collector never touches.
    gc.freeze()
    tests = os.getppid()
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 20, _FILES_AT_MOST)
        if not message:
            return None
        _import_workers(json.loads(message).get("arguments", ()))
        if between := os.fork():
            os.waitpid(between, 0)
            for file in files:
                os.close(file)
            continue
        if os.fork():
            os._exit(0)
        while os.getppid() != tests:
            # The tests have ended, so that nobody adopts this process.
            if _has_ended(tests):
                os._exit(1)
            time.sleep(0.001)
        os.setsid()
        control.send(str(os.getpid()).encode())
        control.close()
        order = json.loads(message)
        # The numbers may be those of files that have come and have no place yet.
        above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(order["numbers"]) + 1) for file in files]
        for file in files:
            os.close(file)
        for number, file in zip(order["numbers"], above, strict=True):
            os.dup2(file, number)
            os.close(file)
        return order


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def become(order: dict[str, Any]) -> None:
    """Carry out an order in a fork."""
    from spurline_concurrency import child

    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if "words" in order:
        from spurline.cli import main

        # Libraries report objects that are not collected at exit.
        gc.unfreeze()
        # As a terminal starts commands, also where the tests were started with `nohup` or in the background.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Where temporary files go is a matter of the environment too.
        tempfile.tempdir = None
        if order["warm_children"]:
            children = ForkedChildren()
            setattr(child, "subprocess", children)  # noqa: B010 - another type than the module's
            util.spawnv_passfds = children.spawn
        sys.argv[1:] = order["words"]
        main()
        return

    from setproctitle import setproctitle

    code: Any = 0
    try:
        if "program" in order:
            setproctitle(" ".join([sys.executable, "-c", order["program"], *order["arguments"]]))
            sys.argv[1:] = order["arguments"]
            exec(order["program"], {})
        else:
            setproctitle(" ".join([sys.executable, "-P", "-m", child.__name__, *order["arguments"]]))
            child._main(*order["arguments"])
    except SystemExit as end:
        code = end.code
    if code is None or isinstance(code, int):
        # As the interpreter ends, but for freeing all objects, which would copy the memory that forks share.
        threading._shutdown()
        atexit._run_exitfuncs()
        util._flush_std_streams()
        os._exit(code or 0)
    sys.exit(code)


if __name__ == "__main__":
    if (order := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        become(order)
