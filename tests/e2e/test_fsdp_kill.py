"""kill -9 of the controller, of one rank, or of all, at random instants; the same command goes on, also on others."""

from __future__ import annotations

import math
import os
import random
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from run_helpers import config_to_kill, deterministic, on_ranks, read_metrics, train_for, wait_for
from warm_runs import WarmProcess, WarmRuns

from spurline import Run, load_config

WriteConfig = Callable[[dict[str, Any]], Path]
Victim = Literal["controller", "rank", "all"]

MANY: tuple[Victim, ...] = ("rank", "controller", "all") * 10


def once_or_often(victim: Victim) -> pytest.MarkDecorator:
    """Runs a test with one kill always, and with ten of each kind where there is time (SPURLINE_SOAK=1)."""
    cases = [pytest.param((victim,), marks=pytest.mark.processes, id="once")]
    if os.environ.get("SPURLINE_SOAK"):
        cases.append(pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="often"))
    return pytest.mark.parametrize("victims", cases)


@once_or_often("rank")
def test_a_killed_run_goes_on_with_the_metrics_of_the_uninterrupted_one_bit_for_bit(
    base_config: dict[str, Any],
    write_config: WriteConfig,
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    tmp_path: Path,
    victims: Sequence[Victim],
) -> None:
    config = on_ranks(config_to_kill(base_config, spurline_chat_file, 6 + 6 * len(victims)))
    _train_and_kill(warm_runs, write_config, [config] * len(victims), victims)
    killed = _finish(config)
    assert killed == _finish(config | {"run_dir": str(tmp_path / "whole")})


@once_or_often("controller")
def test_a_killed_run_goes_on_with_the_same_metrics_on_other_numbers_of_ranks(
    base_config: dict[str, Any],
    write_config: WriteConfig,
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    tmp_path: Path,
    victims: Sequence[Victim],
) -> None:
    config = config_to_kill(base_config, spurline_chat_file, 6 + 6 * len(victims))
    # Dropout is drawn by rank.
    del config["model"]["config_overrides"]
    layouts = [on_ranks(config, 1 + number % 3) for number in range(len(victims))]
    _train_and_kill(warm_runs, write_config, layouts, victims)
    killed, whole = _finish(on_ranks(config, 3)), _finish(on_ranks(config | {"run_dir": str(tmp_path / "whole")}, 2))
    assert len(killed) == len(whole)
    for line, expected in zip(killed, whole, strict=True):
        for name in ("loss", "grad_norm", "lr", "eval/loss"):
            assert (name in line) == (name in expected)
            if name in line:
                where = f"step {line['step']}: {name}"
                assert math.isclose(line[name], expected[name], rel_tol=0.0 if name == "lr" else 1e-5), where


def _train_and_kill(
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
    """Some of its processes; after 5 s none of them is left, and none of the ports they listened at."""
    controller = psutil.Process(process.pid)
    # The process that has imported everything, and the ranks that were forked from it, if they have been by now.
    server = controller.children()
    ranks = [rank for each in server for rank in each.children()]
    ports = [
        connection.laddr.port
        for each in (controller, *ranks)
        for connection in each.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    if victim == "rank" and ranks:
        instants.choice(ranks).kill()
    else:
        for each in (controller, *server, *ranks) if victim == "all" else (controller,):
            each.kill()
    # Taking down an interpreter with torch in it takes two seconds of its own.
    code = process.wait(180)
    assert code == (1 if victim == "rank" and ranks else -signal.SIGKILL)
    wait_for(lambda: not any(each.is_running() for each in (*server, *ranks)), "the end of all processes", 5)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def _finish(config: dict[str, Any]) -> list[dict[str, Any]]:
    assert Run(load_config(config)).train().status == "finished"
    return deterministic(read_metrics(config["run_dir"]))
