"""Reinforcement learning on ranks: the same run as on one process, and no prompt lost, whoever is killed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_every_prompt_ended_once, assert_metrics_close, metrics_of, ranks_of
from child_engines import engines_of, shared_memory_of
from run_helpers import num_lines, read_metrics, wait_for
from vllm_engines import SMALL_VLLM, vllm_models
from warm_runs import WarmRuns

from spurline import Run, load_config

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_children")]

WriteConfig = Callable[[dict[str, Any]], Path]

ON_CPU = {"ranks": 2, "device": "cpu", "num_threads": 1}
BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp": {"name": "fsdp", **ON_CPU},
    "megatron": {"name": "megatron", "tensor": 2, **ON_CPU},
}
ENGINE = {"name": "child_process", "deterministic": True, "num_threads": 1}
EVALUATED = {"held_out": {"max_prompts": 3, "success": {"reward": "early"}}}


def on(backend: str) -> dict[str, Any]:
    """The settings of a run on the ranks of this backend."""
    return {"plugins": ["async_rl", f"{backend}_backend"], "backend": BACKENDS[backend]}


def test_on_ranks_zero_staleness_is_synchronous_training_and_both_are_what_one_process_does(
    rl_config: dict[str, Any], spurline_chat_file: Path
) -> None:
    rl_config["data"]["eval"] = str(spurline_chat_file)
    rl_config["source"] |= EVALUATED
    rl_config |= {"evaluation": {"every_steps": 3}, "report": {"enabled": False}, "checkpoint": {"every_steps": 1000}}
    zero_staleness = {
        **rl_config["source"],
        "name": "async_rollouts",
        "max_staleness": 0,
        "engine": ENGINE,
    }
    local = metrics_of(rl_config, "local")
    synchronous = metrics_of(rl_config, "synchronous", **on("fsdp"))
    asynchronous = metrics_of(rl_config, "asynchronous", **on("fsdp"), source=zero_staleness)
    assert_metrics_close(synchronous, local, 1e-5)
    assert_metrics_close(asynchronous, synchronous, 1e-6)
    assert [line["step"] for line in asynchronous if "eval/pass@1" in line] == [3, 6]
    assert all(line["sync/bytes"] > 0 for line in asynchronous[:-1])


class Life:
    """One run of the command, from its start until it is killed or ends."""

    def __init__(self, runs: WarmRuns, config: Path, metrics: Path) -> None:
        self._log = config.with_suffix(".log")
        self._metrics = metrics
        self._process = runs.start("train", config, output=self._log, warm_children=True)
        self.pid = self._process.pid

    def wait_for_steps(self, steps: int) -> None:
        """Until so many have been done, once training goes on."""
        for more in (1, steps):
            before = num_lines(self._metrics)
            wait_for(
                lambda: self._process.poll() is not None or abs(num_lines(self._metrics) - before) >= more,  # noqa: B023
                f"{steps} steps",
            )
        assert self._process.poll() is None, "it ended before anything was killed: " + self._log.read_text()

    def kill(self, victim: str) -> None:
        """`controller`, `rank` or `engine`."""
        if victim == "controller":
            self._process.kill()
        elif victim == "rank":
            random.Random(self.pid).choice(ranks_of(self.pid)).kill()
        else:
            (engine,) = engines_of(self.pid)
            engine.kill()
            wait_for(lambda: engines_of(self.pid) not in ([], [engine]), "another engine")

    def wait_for_end(self) -> str:
        """Until nothing is left of it; returns what it wrote."""
        self._process.wait(60)
        for what, left in (("engines", engines_of), ("ranks", ranks_of), ("memory", shared_memory_of)):
            wait_for(lambda: not left(self.pid), f"the {what} of an ended run to go", timeout_s=25)  # noqa: B023
        return self._log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_controller_ranks_and_engines_killed_in_turn_lose_no_prompt_and_leave_nothing(
    rl_config: dict[str, Any], write_config: WriteConfig, warm_runs: WarmRuns
) -> None:
    lives = [["engine", "controller"], ["rank"]]
    if os.environ.get("SPURLINE_SOAK"):
        lives = [["controller"], ["rank"], *lives] * 4
    rl_config["source"] |= {
        "name": "async_rollouts",
        "max_staleness": 1,
        "correction": "tis",
        "record_groups": True,
        "engine": {"name": "child_process", "num_threads": 1, "max_restarts": 1000},
    }
    rl_config |= {**on("fsdp"), "report": {"enabled": False}}
    rl_config |= {"steps": 14 * len(lives), "checkpoint": {"every_steps": 3}}
    path, metrics = write_config(rl_config), Path(rl_config["run_dir"]) / "metrics.jsonl"
    instants = random.Random(11)
    for victims in lives:
        life = Life(warm_runs, path, metrics)
        for victim in victims:
            life.wait_for_steps(instants.randint(1, 4))
            time.sleep(instants.uniform(0, 0.2))
            life.kill(victim)
        said = life.wait_for_end()
        if victims[-1] == "rank":
            assert "was killed by SIGKILL" in said, said
            assert "Rank" in said
    assert Run(load_config(path)).train().status == "finished"
    assert_every_prompt_ended_once(rl_config)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="publishing has tests of its own; SPURLINE_SOAK=1")
def test_on_divided_layers_a_run_without_staleness_is_what_one_process_does(rl_config: dict[str, Any]) -> None:
    rl_config |= {"report": {"enabled": False}, "checkpoint": {"every_steps": 1000}}
    source = {**rl_config["source"], "name": "async_rollouts", "max_staleness": 0, "engine": ENGINE}
    local = metrics_of(rl_config, "local")
    divided = metrics_of(rl_config, "on-ranks", source=source, **on("megatron"))
    assert len(divided) == 6
    assert_metrics_close(divided, local, 1e-5)
    assert all(line["sync/bytes"] > 0 for line in divided[:-1])


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="starts an engine; SPURLINE_SOAK=1")
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("backend", BACKENDS)
def test_vllm_generates_with_the_weights_that_ranks_have_trained(
    rl_config: dict[str, Any], tmp_path: Path, backend: str
) -> None:
    pytest.importorskip("vllm", reason="make test installs vLLM on machines without a GPU", exc_type=ImportError)
    rl_config["model"] = {"path": str(vllm_models(tmp_path, "untied").old)}
    rl_config["source"] |= {
        "name": "async_rollouts",
        "max_staleness": 0,
        "record_groups": True,
        "sampling": {"max_new_tokens": 12},
        "engine": dict(SMALL_VLLM),
    }
    rl_config |= {"steps": 8, "report": {"enabled": False}, **on(backend)}
    Run(load_config(rl_config)).train()
    assert_every_prompt_ended_once(rl_config)
    lines = read_metrics(rl_config["run_dir"])
    assert all(line["sync/bytes"] > 0 for line in lines[:-1])
    # Tokens of the weights that are trained: what vLLM computes is what the ranks compute.
    assert [line["staleness/max"] for line in lines] == [0] * 8
    assert all(line["mismatch/logprob_diff/max"] < 1e-4 for line in lines)
    assert ranks_of(os.getpid()) == []
