"""Reinforcement learning on ranks equals the run of one process, and kills lose no prompt."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_every_prompt_ended_once, asynchronous, ranks_of
from child_engines import engines_of, shared_memory_of
from every_run import IN_LONG_RUNS, SOAK
from run_helpers import Config, KillableProcess, assert_metrics_close, on_ranks, train, wait_for

pytestmark = pytest.mark.processes

BACKENDS: dict[str, Config] = {"fsdp": {}, "megatron": {"tensor": 2}}
ENGINE = {"name": "child_process", "deterministic": True, "num_threads": 1}


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=IN_LONG_RUNS)])
def test_on_ranks_zero_staleness_is_synchronous_training_and_both_are_what_one_process_does(
    rl_config: Config, spurline_chat_file: Path, backend: str
) -> None:
    rl_config["data"]["eval"] = str(spurline_chat_file)
    rl_config["source"]["held_out"] = {"max_prompts": 3, "success": {"reward": "early"}}
    rl_config |= {"steps": 4, "evaluation": {"every_steps": 2}, "report": {"enabled": False}, "checkpoint": {}}
    ranks = on_ranks(rl_config, backend=backend, **BACKENDS[backend])
    local = train(rl_config, name="local").without_times
    synchronous = train(ranks, name="synchronous").without_times
    run = train(asynchronous(ranks, max_staleness=0, engine=ENGINE), name="asynchronous")
    assert_metrics_close(synchronous, local, 1e-5)
    assert_metrics_close(run.without_times, synchronous, 1e-6)
    assert [line["step"] for line in run.lines if "eval/pass@1" in line] == [2, 4]
    assert all(line["sync/bytes"] > 0 for line in run.lines[:-1])


def _kill(process: KillableProcess, victim: str) -> None:
    """`controller`, `rank` or `engine`."""
    if victim == "controller":
        process.kill()
    elif victim == "rank":
        random.Random(process.pid).choice(ranks_of(process.pid)).kill()
    else:
        (engine,) = engines_of(process.pid)
        engine.kill()
        wait_for(lambda: engines_of(process.pid) not in ([], [engine]), "another engine")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_controller_ranks_and_engines_killed_in_turn_lose_no_prompt_and_leave_nothing(
    rl_config: Config, killable_process: Callable[..., KillableProcess]
) -> None:
    lives = [["engine", "rank"]]
    if SOAK:
        lives = [["controller"], ["rank"], ["engine", "controller"], *lives] * 4
    engine: Any = {"name": "child_process", "num_threads": 1, "max_restarts": 1000}
    config = asynchronous(on_ranks(rl_config), max_staleness=1, correction="tis", engine=engine)
    config |= {"steps": 14 * len(lives), "checkpoint": {"every_steps": 3}, "report": {"enabled": False}}
    instants = random.Random(11)
    for victims in lives:
        process = killable_process(config, warm_children=True)
        for victim in victims:
            process.wait_for_steps(instants.randint(1, 4))
            time.sleep(instants.uniform(0, 0.2))
            _kill(process, victim)
        process.wait(60)
        for what, left in (("engines", engines_of), ("ranks", ranks_of), ("memory", shared_memory_of)):
            wait_for(lambda: not left(process.pid), f"the {what} of an ended run to go", timeout_s=25)  # noqa: B023
        if victims[-1] == "rank":
            assert "was killed by SIGKILL" in process.said()
            assert "Rank" in process.said()
    assert train(config).status == "finished"
    assert_every_prompt_ended_once(config)
