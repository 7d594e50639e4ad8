"""Read and compare what runs leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def deterministic(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same lines without wall times."""
    return [
        {name: value for name, value in line.items() if not name.startswith("time/") and name != "eval/time"}
        for line in metrics
    ]


def assert_same_weights(one: Path, other: Path) -> None:
    from safetensors.torch import load_file

    paths = [
        sorted((folder / "checkpoints").glob("step-*"))[-1] / "backend/model.safetensors" for folder in (one, other)
    ]
    left, right = (load_file(path) for path in paths)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


def train_command(config: Path) -> list[str]:
    return [sys.executable, "-m", "spurline.cli", "train", str(config)]


def train_and_kill(config: Path, metrics: Path, wait_s: float, *, after_first_step: bool = True) -> None:
    """Start a training process and kill it `wait_s` after its first step, or after its start."""
    process = subprocess.Popen(train_command(config), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    before = metrics.stat().st_size if metrics.exists() else 0
    if after_first_step:
        wait_for(
            lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size != before),
            "a first step after the start",
        )
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    else:
        raise AssertionError(f"the run ended before it could be killed: {process.communicate(timeout=10)[1]}")
    assert process.stderr is not None
    process.stderr.close()
