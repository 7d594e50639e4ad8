"""Whole runs that are killed: all their processes, and prompts whose fate is known beforehand.

`RunTree` finds the processes of a run, kills them in any order, and sees what is left of them.

Each row of the prompts says in its column `fate` what its attempts come to: `trained`; `filtered`, as its rewards are
all equal; `given_up`, as its reward always fails; or `retried`, whose reward fails for a third of the responses, so
that other attempts decide.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

import psutil
from async_runs import assert_every_prompt_ended_once, recorded_groups
from run_helpers import Config, num_lines, wait_for, write_rows
from warm_children import WarmRuns

from spurline import child
from spurline_async_rl.scheduling.scheduler import State

Order = Literal["controller", "a child, later the controller", "children first", "any order", "all at once"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""Who is killed, one after the other. The children of a killed controller have to end by themselves."""
PHASES = ("start", "engines", "steps", "update", "checkpoint")
"""When it is killed: see `RunTree.wait_for_phase`."""
GONE_WITHIN_S = 10.0
"""Seconds after which nothing of a killed run may be left."""
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
        """Wait until the run has finished without an error."""
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
        found = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(self._place)]
        return sorted(found, key=lambda process: process.pid != self._run.pid)

    def children(self) -> list[psutil.Process]:
        """Return the processes that the run has started, such as engines and workers."""
        found: list[psutil.Process] = []
        for process in self.processes():
            with suppress(psutil.Error):
                if {child.__name__, "--multiprocessing-fork"} & {*process.cmdline()}:
                    found.append(process)
        return found

    def kill(self, order: Order, chance: random.Random) -> None:
        # Python's tracker of semaphores removes them after the others end. If it is killed too, they remain.
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
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
            time.sleep(chance.uniform(0, pause_s))
        self._run.wait(10)

    def assert_gone(self) -> None:
        """No process of it, no port, no shared memory and no temporary file."""
        wait_for(lambda: not self.processes(), f"the end of {self.processes()}", GONE_WITHIN_S)
        if self._ports:
            listening = {tuple(at.laddr) for at in psutil.net_connections("tcp") if at.status == psutil.CONN_LISTEN}
            assert not listening & self._ports, f"still listening: {listening & self._ports}"
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
        # A resume first cuts the lines of steps away that no checkpoint covers.
        return num_lines(self.metrics)


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("resource_tracker" in argument for argument in process.cmdline())
    return False


def _shared_memory() -> set[str]:
    return {*os.listdir(_SHARED_MEMORY)} if _SHARED_MEMORY.exists() else set()


def _last_line(path: Path) -> bytes:
    return path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2] if path.exists() else b""


FATES = ("trained", "trained", "filtered", "trained", "retried", "given_up")

REWARDS = '''
import zlib

def fated(answer):
    """Differ between any two responses, except where the row demands something else."""
    fate, seen = answer.row["fate"], zlib.crc32(answer.response.encode())
    if fate == "given_up" or (fate == "retried" and seen % 3 == 0):
        raise ConnectionError("the sandbox is gone")
    return 1.0 if fate == "filtered" else seen / 2**32
'''

AGENT = """
import json, os, socket, sys, zlib

session, address = json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"]
host, _, path = address.removeprefix("http://").partition("/")
asked = json.dumps({"model": session["model"], "messages": session["messages"]}).encode()
head = f"POST /{path}/chat/completions HTTP/1.0\\r\\nHost: {host}\\r\\nContent-Type: application/json\\r\\n"
head += f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\nContent-Length: {len(asked)}\\r\\n\\r\\n"
with socket.create_connection((host.split(":")[0], int(host.split(":")[1]))) as link, link.makefile("rb") as answer:
    link.sendall(head.encode() + asked)
    body = answer.read().partition(b"\\r\\n\\r\\n")[2]
seen, fate = zlib.crc32(json.loads(body)["choices"][0]["message"]["content"].encode()), session["row"]["fate"]
if fate == "given_up" or (fate == "retried" and seen % 3 == 0):
    sys.exit("the sandbox is gone")
print(1.0 if fate == "filtered" else seen / 2**32)
"""
"""The same as a program that asks over HTTP, without imports that take long."""


def write_prompts(path: Path, count: int = 24) -> list[str]:
    """Write the rows; returns their fates."""
    digits = random.Random(0)
    fates = [FATES[number % len(FATES)] for number in range(count)]
    rows = [
        {"messages": [{"role": "user", "content": f"sort {digits.randrange(1000):03}"}], "fate": fate} for fate in fates
    ]
    write_rows(path, rows)
    return fates


def assert_every_prompt_met_its_fate(config: Config, fates: list[str]) -> None:
    """Assert that each prompt ended exactly once, as its row says, with no token older than the bound.

    An epoch draws each row once, so that the rows that nobody trained on are those with another fate.
    """
    scheduler = assert_every_prompt_ended_once(config)
    row_of: dict[int, int] = {}
    for step, group in recorded_groups(config):
        row_of[group.draw] = int(group.uid.rpartition("@")[0].rpartition(":")[2])
        versions = [turn.versions for attempt in group.trajectories for turn in attempt.turns]
        ages = {step - 1 - version for each in versions if each is not None for version in each.tolist()}
        assert min(ages) >= 0, f"step {step}, draw {group.draw}: {ages}"
        assert max(ages) <= config["source"]["max_staleness"], f"step {step}, draw {group.draw}: {ages}"
    filtered, given_up = (set(scheduler.in_state(state)) for state in (State.FILTERED, State.GIVEN_UP))
    for first in range(0, scheduler.num_drawn, len(fates)):
        draws = set(range(first, min(first + len(fates), scheduler.num_drawn)))
        rows = [row_of[draw] for draw in sorted(draws) if draw in row_of]
        assert len({*rows}) == len(rows), f"a row was trained on twice in the epoch that begins with draw {first}"
        met = Counter(fates[row] for row in rows)
        assert met.keys() <= {"trained", "retried"}, f"epoch of draw {first}: {met}"
        if len(draws) == len(fates):
            left = Counter(fates) - met
            assert len(filtered & draws) == left["filtered"]
            assert len(given_up & draws) == left["given_up"] + left["retried"]
            assert not left["trained"]
