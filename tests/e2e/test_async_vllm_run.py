"""A whole asynchronous run on real vLLM, whose engine is killed on the way, and whose controller is killed too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_runs import assert_every_prompt_ended_once
from every_run import SOAK
from living_processes import living_below
from run_helpers import read_metrics, train_command, wait_for
from vllm_engines import SMALL_VLLM, vllm_models

from spurline import Run, load_config
from spurline.plugins.hookspecs import hookimpl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]

WriteConfig = Callable[[dict[str, Any]], Path]


@pytest.fixture
def vllm_config(rl_config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Eight steps with one vLLM engine of the tests' model."""
    pytest.importorskip("vllm", reason="make test installs vLLM on machines without a GPU", exc_type=ImportError)
    rl_config["plugins"] = ["async_rl"]
    rl_config["model"] = {"path": str(vllm_models(tmp_path, "untied").old)}
    rl_config["steps"] = 8
    rl_config["source"] |= {
        "name": "async_rollouts",
        "max_staleness": 2,
        "correction": "tis",
        "record_groups": True,
        "max_concurrent_groups": 4,
        "sampling": {"max_new_tokens": 12},
        "engine": dict(SMALL_VLLM),
    }
    return rl_config


def blocks(pid: int, number: signal.Signals) -> bool:
    """Whether a process never gets this signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


class KillEngineAtStep3:
    """Kills vLLM's own process while it generates."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    @hookimpl
    def on_weights_synced(self, step: int) -> None:
        if step == 3:
            for process in living_below(os.getpid(), "VLLM"):
                # Ctrl-C in a terminal must leave the engine to the run, which finishes its step.
                assert blocks(process.pid, signal.SIGINT)
                self.killed.append(process.pid)
                process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "kills",
    [
        False,
        # Every run kills an engine of `test_vllm_engine.py`, and child engines of runs.
        pytest.param(True, marks=pytest.mark.skipif(not SOAK, reason="starts another engine; SPURLINE_SOAK=1")),
    ],
)
def test_a_run_trains_on_tokens_of_the_right_weights_also_after_its_engine_was_killed(
    vllm_config: dict[str, Any], kills: bool
) -> None:
    loaded = load_config(vllm_config)
    killer = KillEngineAtStep3()
    if kills:
        loaded.host.attach(killer, "kill-engine")
    Run(loaded).train()
    assert bool(killer.killed) == kills, "no engine process was found"
    assert_every_prompt_ended_once(vllm_config)
    lines = read_metrics(vllm_config["run_dir"])
    assert lines[0]["staleness/max"] == 0
    # Tokens of the weights that are trained: what vLLM computes is what the trainer computes.
    assert lines[0]["mismatch/logprob_diff/max"] < 1e-4
    assert max(line["staleness/max"] for line in lines) <= 2
    fresh = [line for line in lines if line["staleness/max"] == 0]
    assert all(line["mismatch/logprob_diff/max"] < 1e-4 for line in fresh)
    assert living_below(os.getpid(), "VLLM") == []


@pytest.mark.skipif(not SOAK, reason="starts three engines; SPURLINE_SOAK=1")
def test_a_controller_that_is_killed_leaves_no_engine_and_loses_no_prompt(
    vllm_config: dict[str, Any], write_config: WriteConfig
) -> None:
    vllm_config |= {"steps": 60, "checkpoint": {"every_steps": 2}, "report": {"enabled": False}}
    path = write_config(vllm_config)
    metrics = Path(vllm_config["run_dir"]) / "metrics.jsonl"
    for _ in range(2):
        written = metrics.stat().st_size if metrics.exists() else 0
        controller = subprocess.Popen(train_command(path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > written + 500, "some steps", 900)  # noqa: B023
        engines = living_below(controller.pid, "VLLM")
        assert engines
        controller.kill()
        controller.wait(10)
        _, alive = psutil.wait_procs(engines, timeout=60)
        assert not alive, "engines outlived their controller"
    subprocess.run([*train_command(path)], check=True, stdout=sys.stderr, timeout=1200)
    assert_every_prompt_ended_once(vllm_config)
