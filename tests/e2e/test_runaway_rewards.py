"""Whole runs whose reward function runs away on some responses: they go on, and nothing is left of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from async_runs import synchronous
from run_helpers import Config, assert_same_weights, train

pytestmark = [pytest.mark.slow, pytest.mark.processes]

REWARDS = """
import asyncio, os, pathlib, time

def note(answer):
    with open(pathlib.Path(__file__).parent / "pids", "a") as file:
        file.write(f"{os.getpid()}\\n")

def spins(answer):
    note(answer)
    while sum(answer.response.encode()) % 16 == 0:
        pass
    return float(len(answer.response) % 5)

async def blocks(answer):
    await asyncio.sleep(0.001)
    return spins(answer)

def sleeps(answer):
    while sum(answer.response.encode()) % 16 == 0:
        time.sleep(60)
    return float(len(answer.response) % 5)
"""


def config_of(rl_config: Config, module: Path, source: dict[str, Any], function: str) -> Config:
    module.write_text(REWARDS, encoding="utf-8")
    reward = {"name": "function", "path": f"{module}:{function}", "timeout_s": 0.4}
    faults = {"retries": 8, "max_quarantined": 64}
    source = {"environment": {"rewards": {"odd": reward}}, "reward_weights": {}, "faults": faults, **source}
    return rl_config | {"plugins": ["async_rl"], "source": rl_config["source"] | source}


@pytest.mark.parametrize(
    ("source", "function"),
    [({"name": "rollouts"}, "blocks"), ({"name": "async_rollouts", "max_staleness": 1, "correction": "tis"}, "spins")],
    ids=["synchronous", "asynchronous"],
)
def test_a_reward_that_never_returns_on_some_responses_holds_up_no_step(
    rl_config: Config, tmp_path: Path, source: dict[str, Any], function: str
) -> None:
    config = config_of(rl_config, tmp_path / "odd.py", source, function)
    assert train(config, steps=4).steps == [1, 2, 3, 4]
    workers = set(map(int, (tmp_path / "pids").read_text().split()))
    # Some were killed and replaced; all are gone.
    assert len(workers) > 1
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert os.getpid() not in workers


def test_without_staleness_a_run_with_worker_processes_equals_the_synchronous_one_bit_for_bit(
    rl_config: Config, tmp_path: Path
) -> None:
    config = config_of(rl_config, tmp_path / "odd.py", {"name": "async_rollouts", "max_staleness": 0}, "sleeps")
    # A call that a busy machine holds up longer would be made again, with another response.
    config["source"]["environment"]["rewards"]["odd"]["timeout_s"] = 4.0
    config["steps"] = 3
    assert_same_weights(train(config), train(synchronous(config), name="synchronous"))
