"""Whole runs killed with all their processes, at any instant and in any order: nothing is lost, doubled or left behind.

Ten kills in all; SPURLINE_SOAK=1 makes 200, at random instants. Each row of the prompts says in its column `fate` what
its attempts come to (see `fated`). Asynchronous runs without agents have two environments of different shape.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import fated
import psutil
import pytest
from async_runs import (
    IN_PROCESS,
    assert_every_prompt_ended_once,
    asynchronous,
    comparable,
    kept_attempts,
    recorded_groups,
    synchronous,
)
from every_run import SOAK
from fated import two_environments, write_prompts
from reward_functions import in_process
from run_helpers import Config, Trained, WriteConfig, assert_same_weights, num_lines, read_metrics, train, wait_for
from warm_children import WarmRuns

from spurline.run.checkpoints.state_files import read_state
from spurline_async_rl.scheduling.scheduler import State
from spurline_collation_fast.cache.entry import open_entry
from spurline_concurrency import child

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]

Order = Literal["controller", "a child, later the controller", "children first", "any order", "all at once"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""Who is killed, one after the other. The children of a killed controller have to end by themselves."""
PHASES = ("start", "engines", "steps", "update", "checkpoint")
"""When it is killed: see `RunTree.wait_for_phase`."""
GONE_WITHIN_S = 10.0
"""Seconds after which nothing of a killed run may be left."""
SHARED_MEMORY = Path("/dev/shm")
Kill = tuple[str, Order]
"""The phase in which a run is killed, and the order of its victims."""
Kills = Sequence[Kill]
TrainAndKill = Callable[[dict[str, Any], Kills], None]

IN_ONE_PROCESS = ("start", "steps", "checkpoint")
"""Phases of a run that starts no processes and records no groups."""
BY_TIME = ("collation/", "groups/retries")
"""Metrics that depend on time. Groups that fail for good end while some of their attempts are retried."""


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
        assert not left, f"left in {SHARED_MEMORY}: {left}"
        left = [str(path) for path in self.temporary.rglob("*")]
        assert not left, f"left: {left}"

    def _note_holdings(self, tree: list[psutil.Process]) -> None:
        for process in tree:
            with suppress(psutil.Error, OSError):
                self._ports |= {
                    (at.laddr.ip, at.laddr.port) for at in process.net_connections() if at.status == "LISTEN"
                }
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._memory |= {name for name in _shared_memory() if str(SHARED_MEMORY / name) in maps}

    def _last_step(self) -> int:
        # A resume first cuts the lines of steps away that no checkpoint covers.
        return num_lines(self.metrics)


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("resource_tracker" in argument for argument in process.cmdline())
    return False


def _shared_memory() -> set[str]:
    return {*os.listdir(SHARED_MEMORY)} if SHARED_MEMORY.exists() else set()


def _last_line(path: Path) -> bytes:
    return path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2] if path.exists() else b""


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


def assert_every_prompt_met_its_fate(config: Config, fates: list[str]) -> None:
    """Assert that each prompt ended exactly once, as its row says, with no token older than the bound.

    An epoch draws each row once, so that the rows that nobody trained on are those with another fate. In a run with two
    environments, the metrics of each count the draws of its rows, each of them once.
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
    trained, lost = Counter(group.environment for _, group in recorded_groups(config)), 0
    for label in config["source"]["environment"].get("environments", ()):
        drawn, filtered_here, lost_here = (
            sum(line.get(f"env/{label}/{name}", 0) for line in read_metrics(config["run_dir"]))
            for name in ("drawn", "filtered", "quarantined")
        )
        assert drawn - filtered_here - lost_here == trained[label] > 0
        lost += lost_here
    # The newest checkpoint has the prompts that were given up after the last batch.
    assert trained[""] or lost + len(state_of(config)["given_up"]) == len(given_up)


def state_of(config: Config) -> Mapping[str, Any]:
    """Return the state of the source in the newest checkpoint."""
    newest = sorted((Path(config["run_dir"]) / "checkpoints").glob("step-*"))[-1]
    return read_state(newest / "components" / "source" / "async_rollouts")


def plans(*kills: Kill, soak: int, phases: Sequence[str] = PHASES) -> list[Any]:
    """Return the kills of each run: these of one run, or `soak` random ones in a long test, ten a run."""
    if not SOAK:
        return [pytest.param(kills, id="")]
    chances = [(seed, random.Random(seed)) for seed in range(soak // 10)]
    return [
        pytest.param([(chance.choice(phases), chance.choice(ORDERS)) for _ in range(10)], id=f"seed-{seed}")
        for seed, chance in chances
    ]


@pytest.fixture
def fated_config(rl_config: Config, tmp_path: Path) -> Config:
    """An asynchronous run that filters groups, makes failed attempts again, gives prompts up and sends changes."""
    shutil.copy(str(fated.__file__), tmp_path / "modules" / "fated_rewards.py")
    write_prompts(tmp_path / "fated.jsonl")
    rl_config |= {
        "data": {"train": str(tmp_path / "fated.jsonl"), "max_length": 128, "on_ignored": "warn"},
        "plugins": ["agents"],
        "report": {"enabled": False},
        "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 1},
        "checkpoint": {"every_steps": 2, "keep_last": 1},
    }
    return asynchronous(
        rl_config,
        prompts_per_step=2,
        samples_per_prompt=2,
        max_staleness=2,
        correction="tis",
        max_concurrent_groups=2,
        zero_variance="refill",
        environment=two_environments("fated_rewards", in_process("fated_rewards:fated")),
        reward_weights={},
        engine={"name": "child_process", "engines": 1, "max_restarts": 1000, "deterministic": True},
        weight_sync={"name": "shared_memory", "full_every": 3},
        faults={"retries": 1, "max_quarantined": 64},
    )


@pytest.fixture
def train_and_kill(
    warm_runs: WarmRuns, write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TrainAndKill:
    """Train a config to its end, killed on the way; after every kill, nothing of the run is left."""
    place = tmp_path / "place"
    monkeypatch.setenv("TMPDIR", str(place / "tmp"))
    chance = random.Random(3)

    def run(config: Config, kills: Kills) -> None:
        tree = RunTree(warm_runs, write_config(config), Path(config["run_dir"]), place)
        for phase, order in kills:
            # Long runs start some engines as the product does.
            tree.start(warm_children=not SOAK or chance.random() < 0.9)
            if tree.wait_for_phase(phase, chance, config["steps"]):
                tree.kill(order, chance)
                tree.assert_gone()
            else:
                tree.finish()
                assert phase == "close", "the run ended before it could be killed"
        tree.start()
        tree.finish()
        left = [str(path) for path in Path(config["run_dir"]).rglob("*.tmp")]
        assert not left, f"left in the run directory: {left}"

    return run


@pytest.mark.parametrize(
    "kills",
    plans(
        ("steps", "a child, later the controller"),
        ("engines", "children first"),
        ("update", "any order"),
        ("checkpoint", "all at once"),
        soak=80,
    ),
)
def test_a_run_ahead_of_training_ends_every_prompt_once_whenever_it_is_killed(
    fated_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    fated_config["steps"] = 3 * len(kills) + 2
    fated_config["checkpoint"]["async"] = True
    fated_config["source"] |= {"max_concurrent_groups": 4}
    fated_config["source"]["engine"]["engines"] = 2
    # In processes of their own, which have to end with the run too.
    fated_config["source"]["environment"] = two_environments("fated_rewards", "fated_rewards:fated")
    train_and_kill(fated_config, kills)
    assert_every_prompt_met_its_fate(fated_config, write_prompts(tmp_path / "fated.jsonl"))


@pytest.mark.parametrize(
    "kills", plans(("update", "children first"), ("start", "controller"), ("close", "controller"), soak=60)
)
def test_a_run_without_staleness_ends_with_the_weights_of_one_that_was_never_killed_and_of_a_synchronous_one(
    fated_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    source = fated_config["source"]
    del source["correction"]
    source["max_staleness"] = 0
    fated_config["steps"] = 3 * len(kills) + 2
    train_and_kill(fated_config, kills)
    assert_every_prompt_met_its_fate(fated_config, write_prompts(tmp_path / "fated.jsonl"))
    whole = train(fated_config, name="whole", source=source | {"engine": IN_PROCESS, "weight_sync": None})
    twin = train(synchronous(fated_config), name="twin")
    lines = numbers(fated_config["run_dir"])
    assert lines == numbers(whole) == numbers(twin)
    counts = {f"env/{label}/{name}" for label in ("once", "twice") for name in ("drawn", "filtered", "quarantined")}
    assert counts <= {name for line in lines for name in line}
    assert {"groups/filtered", "groups/quarantined"} <= {name for line in lines for name in line if line[name]}
    for unkilled in (whole, twin):
        assert_same_weights(fated_config["run_dir"], unkilled)


def numbers(run: Trained | Path | str) -> list[dict[str, Any]]:
    """The metrics that every run of the same prompts and seeds has in common."""
    return [{name: value for name, value in line.items() if not name.startswith(BY_TIME)} for line in comparable(run)]


@pytest.mark.parametrize(
    "kills",
    plans(("evaluation", "controller"), ("steps", "controller"), soak=100, phases=(*IN_ONE_PROCESS, "evaluation")),
)
def test_a_killed_synchronous_run_does_again_what_no_checkpoint_covers(
    fated_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    config = synchronous(fated_config)
    del config["source"]["correction"]
    config["source"]["held_out"] = {"max_prompts": 2, "success": {"at_least": 0.5}}
    config["data"]["eval"] = str(tmp_path / "held-out.jsonl")
    write_prompts(tmp_path / "held-out.jsonl", 3)
    config |= {"evaluation": {"every_steps": 4}, "steps": 3 * len(kills) + 2, "checkpoint": {"every_steps": 3}}
    train_and_kill(config, kills)
    whole = train(config, name="whole")
    assert numbers(config["run_dir"]) == numbers(whole)
    assert_same_weights(config["run_dir"], whole)
    assert len({Path(run, "eval_samples.jsonl").read_text() for run in (config["run_dir"], whole)}) == 1
    assert kept_attempts(config["run_dir"]) == kept_attempts(whole)


@pytest.mark.parametrize("kills", plans(("steps", "any order"), soak=20))
def test_programs_of_agents_weights_on_disk_and_the_endpoint_end_with_the_run(
    fated_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT, encoding="utf-8")
    fated_config["steps"] = 3 * len(kills) + 2
    fated_config["source"] |= {
        "max_staleness": 1,
        "environment": {"name": "harness", "command": [sys.executable, "-I", "-S", str(agent)]},
        "weight_sync": {"name": "disk", "full_every": 3},
    }
    train_and_kill(fated_config, kills)
    assert_every_prompt_met_its_fate(fated_config, write_prompts(tmp_path / "fated.jsonl"))
    assert not [*(Path(fated_config["run_dir"]) / "weights").iterdir()]


@pytest.mark.parametrize("kills", plans(("workers", "any order"), soak=20, phases=("start", "steps")))
def test_a_run_killed_while_it_fills_the_token_cache_fills_it_again(
    base_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    row = {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it " * 20}]}
    base_config["data"]["train"] = str(tmp_path / "long.jsonl")
    Path(base_config["data"]["train"]).write_text((json.dumps(row) + "\n") * 1200, encoding="utf-8")
    base_config |= {"steps": 3 * len(kills) + 2, "report": {"enabled": False}}
    base_config["plugins"] = ["collation_fast"]
    base_config["tokenization"] = {"name": "parallel", "workers": 2, "cache_dir": str(tmp_path / "cache")}
    train_and_kill(base_config, kills)
    [entry] = (tmp_path / "cache").iterdir()
    open_entry(entry, whole=True)
    sequential = {"plugins": ["collation_fast"], "tokenization": {"name": "text/sequential"}}
    whole = train(base_config, name="whole", **sequential)
    assert numbers(base_config["run_dir"]) == numbers(whole)
    assert_same_weights(base_config["run_dir"], whole)
