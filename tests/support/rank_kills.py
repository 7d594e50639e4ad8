"""Kill the controller of a run on several ranks, one rank, or all of them, at random instants."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from run_helpers import deterministic, read_metrics, train_for, wait_for
from warm_runs import WarmProcess, WarmRuns

from spurline import Run, load_config

WriteConfig = Callable[[dict[str, Any]], Path]
Victim = Literal["controller", "rank", "all"]

MANY: tuple[Victim, ...] = ("rank", "controller", "all") * 10

LISTENS = "0A"
"""State of a socket in the tables of the kernel."""


def once_or_often(victim: Victim) -> pytest.MarkDecorator:
    """Runs a test with one kill always, and with ten of each kind where there is time (SPURLINE_SOAK=1)."""
    cases = [pytest.param((victim,), marks=pytest.mark.processes, id="once")]
    if os.environ.get("SPURLINE_SOAK"):
        cases.append(pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="often"))
    return pytest.mark.parametrize("victims", cases)


def train_and_kill_each(
    runs: WarmRuns, write_config: WriteConfig, configs: Sequence[dict[str, Any]], victims: Sequence[Victim]
) -> None:
    """Train each of these in turn until some of its processes are killed. Nothing is left of it."""
    instants = random.Random(7)
    for number, (config, victim) in enumerate(zip(configs, victims, strict=True)):
        metrics = Path(config["run_dir"]) / "metrics.jsonl"
        # Every fourth somewhere in the start: ranks come up, load the model, restore.
        steps = instants.randint(1, 5) if number % 4 != 3 else None
        process = train_for(
            runs,
            write_config(config),
            metrics,
            steps=steps,
            wait_s=instants.uniform(0, 4.0 if steps is None else 0.05),
        )
        _kill(process, victim, instants)


def _kill(process: WarmProcess, victim: Victim, instants: random.Random) -> None:
    """Some of its processes; soon none of them is left, and no socket they listened at."""
    controller = psutil.Process(process.pid)
    # The process that has imported everything, and the ranks that were forked from it, if they have been by now.
    server = controller.children()
    ranks = [rank for each in server for rank in each.children()]
    sockets = set[str]().union(*map(_sockets_of, (controller, *ranks)))
    listening = sockets & _listening_sockets()
    if victim == "rank" and ranks:
        instants.choice(ranks).kill()
    else:
        for each in (controller, *server, *ranks) if victim == "all" else (controller,):
            each.kill()
    # Taking down an interpreter with torch in it takes two seconds of its own.
    code = process.wait(180)
    assert code == (1 if victim == "rank" and ranks else -signal.SIGKILL)
    wait_for(lambda: not any(each.is_running() for each in (*server, *ranks)), "the end of all processes", 25)
    # Not the ports: another program of this machine may have been given one of them by now.
    assert not listening & _listening_sockets()


def _sockets_of(process: psutil.Process) -> set[str]:
    """Their numbers; those of a process that has ended are unknown."""
    found: set[str] = set()
    try:
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            # A descriptor may be closed while this looks at it.
            with suppress(FileNotFoundError):
                kind, _, number = descriptor.readlink().name.partition(":")
                if kind == "socket":
                    found.add(number.strip("[]"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return found


def _listening_sockets() -> set[str]:
    """Numbers of the TCP sockets of this machine that accept connections."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    return {fields[9] for fields in lines if fields[3] == LISTENS}


def finish(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Train to the end; returns the metrics without times."""
    assert Run(load_config(config)).train().status == "finished"
    return deterministic(read_metrics(config["run_dir"]))


def assert_same_to_rounding(killed: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    assert len(killed) == len(whole)
    for line, expected in zip(killed, whole, strict=True):
        for name in ("loss", "grad_norm", "lr", "eval/loss"):
            assert (name in line) == (name in expected)
            if name in line:
                where = f"step {line['step']}: {name}"
                assert math.isclose(line[name], expected[name], rel_tol=0.0 if name == "lr" else 1e-5), where
