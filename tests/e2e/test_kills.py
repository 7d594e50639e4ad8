"""kill -9 at random instants, of one process or of ranks; the same command goes on with the uninterrupted metrics."""

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
from run_helpers import (
    assert_same_weights,
    config_to_kill,
    deterministic,
    on_ranks,
    read_metrics,
    train_and_kill,
    train_for,
    wait_for,
)
from warm_runs import WarmProcess, WarmRuns

from spurline import Run, load_config
from spurline.run.checkpoints.checkpoint import CheckpointStore

WriteConfig = Callable[[dict[str, Any]], Path]
Victim = Literal["controller", "rank", "all"]

SOAK = bool(os.environ.get("SPURLINE_SOAK"))
MANY: tuple[Victim, ...] = ("rank", "controller", "all") * 10
LISTENS = "0A"
"""State of a socket in the tables of the kernel."""

LAYOUTS: tuple[dict[str, int], ...] = (
    {"ranks": 2, "pipeline": 2},
    {"ranks": 2, "tensor": 2},
    {"ranks": 2},
    {"ranks": 2, "context": 2},
    {"ranks": 1},
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("beside", [False, True])
def test_a_killed_run_of_one_process_ends_with_the_metrics_of_the_uninterrupted_one(
    base_config: dict[str, Any],
    write_config: WriteConfig,
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    tmp_path: Path,
    beside: bool,
) -> None:
    """beside: checkpoints are written while training goes on, after each step, so that most kills come into a write."""
    kills = (20 if beside else 100) if SOAK else 2 if beside else 4
    config = config_to_kill(base_config, spurline_chat_file, 12 * kills)
    if beside:
        config["checkpoint"] = {"every_steps": 1, "async": True}
    whole = finish(config | {"run_dir": str(tmp_path / "whole")})
    path = write_config(config)
    random_instants = random.Random(7)
    metrics = Path(config["run_dir"]) / "metrics.jsonl"
    for kill in range(kills):
        # Every fourth somewhere in the start: reading, restoring, cutting the metrics back.
        steps = random_instants.randint(1, 6) if kill % 4 != 3 else None
        wait_s = random_instants.uniform(0, 0.4 if steps is None else 0.03)
        train_and_kill(warm_runs, path, metrics, steps=steps, wait_s=wait_s)
        if (Path(config["run_dir"]) / "checkpoints").exists():
            CheckpointStore(Path(config["run_dir"]) / "checkpoints").latest()
    assert finish(config) == whole
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(("rank",), marks=pytest.mark.processes, id="once"),
        pytest.param(
            MANY,
            marks=[pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.skipif(not SOAK, reason="SPURLINE_SOAK=1")],
            id="often",
        ),
    ],
)
@pytest.mark.parametrize("case", ["fsdp", "fsdp, other ranks", "megatron, other layouts"])
def test_killed_ranks_go_on_with_the_metrics_of_the_uninterrupted_run(
    base_config: dict[str, Any],
    write_config: WriteConfig,
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    tmp_path: Path,
    case: str,
    victims: Sequence[Victim],
) -> None:
    """On the same ranks they are equal bit for bit, with dropout too, and otherwise to rounding."""
    config = config_to_kill(base_config, spurline_chat_file, 6 + 6 * len(victims))
    if case != "fsdp":
        # Dropout is drawn by rank, and Megatron models have none.
        del config["model"]["config_overrides"]
    whole = config | {"run_dir": str(tmp_path / "whole")}
    if case == "fsdp":
        layouts, last, whole = [on_ranks(config)] * len(victims), on_ranks(config), on_ranks(whole)
    elif case == "fsdp, other ranks":
        victims = ["controller" if victims == ("rank",) else victim for victim in victims]
        layouts = [on_ranks(config, 1 + number % 3) for number in range(len(victims))]
        last, whole = on_ranks(config, 3), on_ranks(whole, 2)
    else:
        sizes = [LAYOUTS[number % len(LAYOUTS)] for number in range(len(victims))]
        layouts = [on_ranks(config, backend="megatron", **size) for size in sizes]
        last = on_ranks(config, backend="megatron", tensor=2)
    train_and_kill_each(warm_runs, write_config, layouts, victims)
    killed, expected = finish(last), finish(whole)
    if case == "fsdp":
        assert killed == expected
    else:
        assert_same_to_rounding(killed, expected)


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
