"""Stop runs, and read and compare what they leave behind."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spurline import Run, load_config
from spurline.errors import HookFailedError
from spurline.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from warm_runs import WarmProcess, WarmRuns

Config = dict[str, Any]
Spurline = Callable[..., tuple[int, str, str]]
"""The fixture `spurline`: (exit code, stdout, stderr) of a command. A mapping among the words is written as YAML."""
WriteConfig = Callable[[Config], Path]


class StopAfter:
    """Ask the run to stop once it finished this step, as SIGTERM would."""

    def __init__(self, step: int) -> None:
        self._step = step

    @hookimpl
    def on_step_start(self, step: int) -> None:
        if step == self._step:
            signal.raise_signal(signal.SIGTERM)


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def deterministic(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same lines without what clocks measured."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("time/", "controller/")) and name != "eval/time"
        }
        for line in metrics
    ]


def train(
    config: Config | Path, *hooks: object, stop_after: int | None = None, available: Any = None, **options: Any
) -> Any:
    """Train in this process, and return the result.

    hooks: attached in this order. stop_after: the step after which the run stops, as SIGTERM would stop it.
    available: plugins in place of those that are installed. options: those of `Run`.
    """
    loaded = load_config(config, available=available)
    for number, hook in enumerate(hooks):
        loaded.host.attach(hook, f"mine/{number}")
    if stop_after is not None:
        loaded.host.attach(StopAfter(stop_after), "stop-after")
    return Run(loaded, **options).train()


def assert_pieces_equal_the_whole(config: Config, folder: Path, stops: Sequence[int], available: Any = None) -> None:
    """Train once without a stop in `folder`/whole, and once that stops after these steps in `folder`/pieces."""
    whole, pieces = (config | {"run_dir": str(folder / name)} for name in ("whole", "pieces"))
    assert train(whole, available=available).status == "finished"
    for stop in stops:
        assert train(pieces, stop_after=stop, available=available).step == stop
    assert train(pieces, available=available).status == "finished"
    assert_same_run(folder / "pieces", folder / "whole")


def assert_same_run(one: Path | str, other: Path | str) -> None:
    """Two run directories have the same metrics but for times, and the same weights, bit for bit."""
    assert deterministic(read_metrics(one)) == deterministic(read_metrics(other))
    assert_same_weights(one, other)


def assert_same_weights(one: Path | str, other: Path | str) -> None:
    """The newest checkpoints of two run directories hold the same weights, bit for bit."""
    from safetensors.torch import load_file

    left, right = (
        load_file(sorted(Path(run_dir, "checkpoints").glob("step-*"))[-1] / "backend/model.safetensors")
        for run_dir in (one, other)
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def write_pairs(path: Path, count: int, seed: int) -> Path:
    """Rows of preference pairs: digits in order are preferred to digits in reverse."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        digits = sorted(rng.sample("0123456789", 3))
        prompt = [{"role": "user", "content": f"sort {''.join(rng.sample(digits, 3))}"}]
        answers = {"chosen": "".join(digits), "rejected": "".join(reversed(digits))}
        rows.append(
            {"prompt": prompt, **{side: [{"role": "assistant", "content": text}] for side, text in answers.items()}}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def on_ranks(config: dict[str, Any], ranks: int = 2, *, backend: str = "fsdp", **settings: Any) -> dict[str, Any]:
    """The config with a backend of several ranks on CPU in place of its own."""
    return config | {
        "plugins": [*config.get("plugins", ()), f"{backend}_backend"],
        "backend": {"name": backend, "device": "cpu", "ranks": ranks, "num_threads": 1, **settings},
    }


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 120, every_s: float = 0.02) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(every_s)


def train_command(config: Path) -> list[str]:
    return [sys.executable, "-m", "spurline.cli", "train", str(config)]


def config_to_kill(config: dict[str, Any], held_out: Path, steps: int) -> dict[str, Any]:
    """The config as a longer run with dropout, evaluations and checkpoints, which come at different steps."""
    changed = config | {
        "steps": steps,
        "checkpoint": {"every_steps": 3},
        "evaluation": {"every_steps": 10},
        "report": {"enabled": False},
    }
    changed["data"] = {**config["data"], "eval": str(held_out)}
    changed["model"] = {**config["model"], "config_overrides": {"attention_dropout": 0.1}}
    return changed


def train_and_kill(runs: WarmRuns, config: Path, metrics: Path, *, steps: int | None, wait_s: float) -> None:
    """Start a training process and kill it `wait_s` after it has done this many steps.

    steps: None to kill it in its start, `wait_s` after that or with its first step.
    """
    process = train_for(runs, config, metrics, steps=steps, wait_s=wait_s)
    process.kill()
    process.wait(10)


def train_for(runs: WarmRuns, config: Path, metrics: Path, *, steps: int | None, wait_s: float) -> WarmProcess:
    """Start a training process; returns it `wait_s` after it has done this many steps. steps: as above."""
    process = runs.start("train", config, output=config.with_suffix(".log"))
    before = num_lines(metrics)
    if steps is None:
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and num_lines(metrics) == before:
            time.sleep(0.002)
    else:
        # Resuming cuts the lines of steps away that no checkpoint covers.
        for more in (1, steps):
            wait_for(
                lambda: process.poll() is not None or abs(num_lines(metrics) - before) >= more,  # noqa: B023
                f"{steps} steps after the start",
                every_s=0.002,
            )
            before = num_lines(metrics)
        time.sleep(wait_s)
    assert process.poll() is None, "the run ended before it could be killed: " + config.with_suffix(".log").read_text()
    return process


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class FailAt:
    """Ends the run before this step is trained."""

    def __init__(self, step: int) -> None:
        self._step = step

    @hookimpl
    def on_step_start(self, step: int) -> None:
        if step == self._step:
            raise ZeroDivisionError


def fail_at(config: Config, step: int) -> None:
    """Train until before this step, and end there by an error."""
    with pytest.raises(HookFailedError):
        train(config, FailAt(step))
