"""`spurline` in processes that begin where the imports end: one process has imported everything, and is forked.

A run that is killed spends most of its life importing torch and transformers. What it does on disk comes after that.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from warm_children import ForkedChildren, find_room_for_titles

import spurline
from spurline import child

IMPORTED = ("torch", "torch._dynamo", "transformers", "transformers.models.qwen3.modeling_qwen3", "datasets")


class WarmProcess:
    """A `subprocess.Popen` of one command of `spurline`, as far as tests use that."""

    def __init__(self, pid: int, runs: WarmRuns) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)
        self._runs = runs

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.wait(0)
        return self.returncode

    def kill(self) -> None:
        signal.pidfd_send_signal(self._ended, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        """The exit code; minus the signal that ended it. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("spurline", timeout_s)
            os.close(self._ended)
            self.returncode = self._runs.ask({"wait": self.pid})
        return self.returncode


class WarmRuns:
    """The process that is forked; it starts with the first command."""

    def __init__(self) -> None:
        self._parent: subprocess.Popen[str] | None = None
        self._started: list[WarmProcess] = []

    def start(
        self, *words: object, output: Path | str = os.devnull, folder: Path | str = ".", warm_children: bool = False
    ) -> WarmProcess:
        """Run `spurline WORDS` with this process's environment.

        output: the file that it writes to. folder: where it runs. warm_children: engines and workers that it starts
        need no imports either.
        """
        order = {
            "words": [str(word) for word in words],
            "environment": dict(os.environ),
            "output": str(output),
            "folder": str(Path(folder).absolute()),
            "warm_children": warm_children,
        }
        self._started.append(WarmProcess(self.ask(order), self))
        return self._started[-1]

    def ask(self, order: dict[str, Any]) -> int:
        if self._parent is None:
            command = [sys.executable, __file__]
            # More threads would be those of a library that computes, started with its import.
            self._parent = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(json.dumps(order), file=self._parent.stdin, flush=True)
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        for process in self._started:
            # A test that failed has left it.
            if process.poll() is None:
                process.kill()
                process.wait(10)
        if self._parent is not None:
            self._parent.communicate(timeout=60)


def serve() -> None:
    """Fork for every order on stdin, in a process without threads, which a fork would lose."""
    find_room_for_titles()
    own = (module.name for module in pkgutil.walk_packages(spurline.__path__, "spurline."))
    for name in (*IMPORTED, *(name for name in own if not name.startswith("spurline.testing"))):
        importlib.import_module(name)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    # The allocator of pyarrow has one, and handles forks.
    assert len(threads) - threads.count("jemalloc_bg_thd") == 1, threads
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            if order["warm_children"]:
                ForkedChildren.prepare()
            answer = os.fork()
            if answer == 0:
                break
        print(answer, file=answers, flush=True)
    else:
        return
    answers.close()
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    files = os.open(os.devnull, os.O_RDONLY), os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, target in zip((*files, files[1]), range(3), strict=True):
        os.dup2(source, target)
    # As a terminal starts commands, also where the tests were started with `nohup` or in the background.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = order["words"]
    os.chdir(order["folder"])
    # Where temporary files go is a matter of the environment too.
    tempfile.tempdir = None
    if order["warm_children"]:
        setattr(child, "subprocess", ForkedChildren())  # noqa: B010 - another type than the module's
    from spurline.cli import main

    main()


if __name__ == "__main__":
    serve()
