"""A run with all its processes: find them, kill them in any order, and see what is left of them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from run_helpers import num_lines, wait_for
from warm_runs import WarmRuns

from spurline import child

Order = Literal["controller", "a child, later the controller", "children first", "any order", "all at once"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""Who is killed, one after the other. The children of a killed controller have to end by themselves."""
PHASES = ("start", "engines", "steps", "update", "checkpoint")
"""When it is killed: see `RunTree.wait_for_phase`."""
GONE_WITHIN_S = 10.0
"""Seconds in which everything of a killed run has to be gone."""
_SHARED_MEMORY = Path("/dev/shm")


class RunTree:
    """Starts `spurline train CONFIG` again and again.

    place: a folder of its own, in which its processes run, which tells them from all others. Temporary files of theirs
    go to `place/tmp`.
    """

    def __init__(self, runs: WarmRuns, config: Path, run_dir: Path, place: Path) -> None:
        self._runs, self._config, self._place = runs, config, place
        self.run_dir = run_dir
        self.metrics = run_dir / "metrics.jsonl"
        self.log = config.with_suffix(".log")
        self.temporary = place / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._ports: set[tuple[str, int]] = set()
        self._memory: set[str] = set()

    def start(self, *, warm_children: bool = True) -> None:
        self._shared_before = _shared_memory()
        self._run = self._runs.start(
            "train", self._config, output=self.log, folder=self._place, warm_children=warm_children
        )

    def finish(self, timeout_s: float = 300.0) -> None:
        """Wait for its end, which has to be a good one."""
        code = self._run.wait(timeout_s)
        assert code == 0, f"exit code {code}: {self.log.read_text()[-3000:]}"
        self.assert_gone()

    def wait_for_phase(self, phase: str, chance: random.Random, last_step: int) -> bool:
        """Wait for an instant of this phase; False when the run has ended before.

        start: while it reads, restores and starts. engines, workers: with its first child process, which an engine has
        for longer. steps: after a few more than it had. update: while it trains on a batch or publishes. checkpoint:
        while it writes one, which comes after a step of an even number. evaluation: after one, before the checkpoint
        that covers it. close: after its last step.
        """
        had = num_lines(self.metrics)
        at_step = min(had + chance.randint(1, 2), last_step)
        even_step = min(at_step + at_step % 2, last_step)
        recorded = self.run_dir / "groups" / f"step-{at_step:06d}.json"
        reached: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "engines": lambda: bool(self.children()),
            "workers": lambda: bool(self.children()),
            "steps": lambda: self._last_step() >= at_step,
            "update": lambda: self._last_step() >= at_step - 1 and recorded.exists(),
            "checkpoint": lambda: self._last_step() >= even_step,
            "evaluation": lambda: self._last_step() > had and b"eval/" in _last_line(self.metrics),
            "close": lambda: self._last_step() >= last_step,
        }
        waits_s = {"start": 0.6, "engines": 0.5, "checkpoint": 0.03, "evaluation": 0.0, "close": 0.3}
        every_s = 0.02 if phase in ("engines", "workers") else 0.005
        wait_for(lambda: self.has_ended or reached[phase](), f"phase {phase}", every_s=every_s)
        time.sleep(chance.uniform(0, waits_s.get(phase, 0.1)))
        return not self.has_ended

    @property
    def has_ended(self) -> bool:
        return self._run.poll() is not None

    def processes(self) -> list[psutil.Process]:
        """Its processes, the controller first."""
        return sorted(_processes_in(self._place), key=lambda process: process.pid != self._run.pid)

    def children(self) -> list[psutil.Process]:
        """What the run has started: engines, workers and the like."""
        found: list[psutil.Process] = []
        for process in self.processes():
            with suppress(psutil.Error):
                if {child.__name__, "--multiprocessing-fork"} & {*process.cmdline()}:
                    found.append(process)
        return found

    def kill(self, order: Order, chance: random.Random) -> None:
        # Python's tracker of semaphores removes them once the others are gone; killed too, it leaves 32 bytes of each.
        tree = [process for process in self.processes() if not _is_tracker(process)]
        self._note_holdings(tree)
        controller, others, children = tree[:1], tree[1:], self.children()
        chance.shuffle(others)
        victims = {
            "controller": controller,
            "a child, later the controller": [*chance.sample(children, min(1, len(children))), *controller],
            "children first": [*others, *controller],
            "any order": chance.sample(tree, len(tree)),
            "all at once": tree,
        }[order]
        pause_s = {"all at once": 0.0, "a child, later the controller": 0.5}.get(order, 0.01)
        for victim in victims:
            _kill(victim)
            time.sleep(chance.uniform(0, pause_s))
        self._run.wait(10)

    def assert_gone(self) -> None:
        """No process of it, no port, no shared memory and no temporary file."""
        wait_for(lambda: not self.processes(), f"the end of {self.processes()}", GONE_WITHIN_S)
        if self._ports:
            listening = _listening(psutil.net_connections("tcp")) & self._ports
            assert not listening, f"still listening: {listening}"
        left = [name for name in _shared_memory() - self._shared_before if name in self._memory or "spurline" in name]
        assert not left, f"left in {_SHARED_MEMORY}: {left}"
        left = [str(path) for path in self.temporary.rglob("*")]
        assert not left, f"left: {left}"

    def _note_holdings(self, tree: list[psutil.Process]) -> None:
        for process in tree:
            with suppress(psutil.Error, OSError):
                self._ports |= {
                    (at.laddr.ip, at.laddr.port) for at in process.net_connections() if at.status == "LISTEN"
                }
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._memory |= {name for name in _shared_memory() if str(_SHARED_MEMORY / name) in maps}

    def _last_step(self) -> int:
        # Cut back in the beginning, when the steps after the last checkpoint are trained again.
        return num_lines(self.metrics)


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("resource_tracker" in argument for argument in process.cmdline())
    return False


def _processes_in(folder: Path) -> Iterator[psutil.Process]:
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        # It may have ended meanwhile, or be another user's.
        with suppress(OSError, psutil.Error):
            if entry.readlink() == folder:
                yield psutil.Process(int(entry.parent.name))


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


def _listening(connections: Iterable[Any]) -> set[tuple[str, int]]:
    return {tuple(at.laddr) for at in connections if at.status == psutil.CONN_LISTEN}


def _shared_memory() -> set[str]:
    return {*os.listdir(_SHARED_MEMORY)} if _SHARED_MEMORY.exists() else set()


def _last_line(path: Path) -> bytes:
    return path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2] if path.exists() else b""
