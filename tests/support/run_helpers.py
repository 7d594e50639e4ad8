"""Train configs, in this process or in one that is killed, and read and compare what the runs leave behind.

Tests of whole runs share these::

    run = train(config)                                     # to the end; a RunResult and more
    assert run.status == "finished"
    assert run.steps == [1, 2, 3]
    assert run.lines[-1]["loss"] < 1                        # metrics.jsonl
    twin = train(config, name="twin", steps=3, loss="dft")  # in RUN_DIR-twin, with these sections changed
    assert twin.without_times == run.without_times
    assert_same_run(twin, run)                              # that, and the weights, bit for bit

    seen = []
    train(config, on_step_end=lambda step: seen.append(step))      # `on_...`: a hook for this run
    train(config, Watcher())                                       # an object with hooks
    train(config, stop_after=3)
    fail_at(config, 3)                                             # ends by an error before step 3
    train(config, on_step_start=at(3, shutil.rmtree, folder))      # calls that when step 3 begins

The fixture `spurline` runs a command in this process: `code, out, err = spurline("plan", config)`. The fixture
`killable_process` trains in another one::

    process = killable_process(config)
    process.wait_for_steps(3, then_s=0.02)
    process.kill()
    assert_same_run(train(config), whole)
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spurline import Run, load_config
from spurline.config.loading import LoadedConfig
from spurline.errors import ConfigError, HookFailedError, Problem
from spurline.plugins.hookspecs import hookimpl
from spurline.run.endings.ending import RunResult

if TYPE_CHECKING:
    from warm_children import WarmRuns

Config = dict[str, Any]
Spurline = Callable[..., tuple[int, str, str]]
"""The fixture `spurline`: (exit code, stdout, stderr) of a command. A mapping among the words is written as YAML."""
WriteConfig = Callable[[Config], Path]


RUN_OPTIONS = ("resume", "allow_change", "progress", "on_step")


@dataclass(frozen=True, kw_only=True)
class Trained(RunResult):
    """A run that ended without an error. Functions that take a run directory take it too."""

    run_dir: Path

    def __fspath__(self) -> str:
        return str(self.run_dir)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir)

    @property
    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines]

    @property
    def without_times(self) -> list[dict[str, Any]]:
        return deterministic(self.lines)


def train(
    config: Mapping[str, Any] | Path | LoadedConfig,
    *hooks: object,
    name: str = "",
    stop_after: int | None = None,
    available: Any = None,
    **changes: Any,
) -> Trained:
    """Train a config in this process.

    Args:
        config: A config, the path of one, or a loaded one.
        hooks: Objects with hooks for this run, called in this order.
        name: Trains in the run directory of this mapping with `-NAME` after it.
        stop_after: The step after which the run stops, as SIGTERM would stop it.
        available: Plugins in place of those that are installed.
        changes: Options of `Run`; functions that are hooks, `on_step_end=...`; sections in place of those of a mapping.
    """
    options = {option: changes.pop(option) for option in RUN_OPTIONS if option in changes}
    named = {hook: hookimpl(changes.pop(hook)) for hook in [*changes] if hook.startswith("on_")}
    if isinstance(config, Mapping):
        run_dir = f"{config['run_dir']}-{name}" if name else config["run_dir"]
        config = {**config, "run_dir": run_dir, **changes}
    loaded = config if isinstance(config, LoadedConfig) else load_config(config, available=available)
    for number, hook in enumerate([*hooks, SimpleNamespace(**named)]):
        loaded.host.attach(hook, f"mine/{number}")
    if stop_after is not None:
        stop = hookimpl(at(stop_after, signal.raise_signal, signal.SIGTERM))
        loaded.host.attach(SimpleNamespace(on_step_start=stop), "mine/stop")
    return Trained(**vars(Run(loaded, **options).train()), run_dir=loaded.config.run_dir)


def at(step: int, do: Callable[..., object], *arguments: object) -> Callable[[int], None]:
    """Return a hook that calls this function at one step."""
    wanted = step

    def hook(step: int) -> None:
        if step == wanted:
            do(*arguments)

    return hook


def fail() -> None:
    raise ZeroDivisionError


def fail_at(config: Mapping[str, Any], step: int) -> None:
    """Train until before this step, and end there by an error."""
    with pytest.raises(HookFailedError):
        train(config, on_step_start=at(step, fail))


def assert_problem(caught: pytest.ExceptionInfo[ConfigError], *, key: str, fix: str = "") -> Problem:
    """Return the first problem with this key whose message contains `fix`; fail with all problems if there is none."""
    for problem in caught.value.problems:
        if problem.key == key and fix in problem.message:
            return problem
    raise AssertionError(f"no problem at {key!r} that says {fix!r}, but:\n{caught.value}")


def read_metrics(run_dir: PathLike[str] | str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def deterministic(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without times, and without what begins again on resume: proofs and comparisons of engines."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("time/", "controller/", "publish/", "mismatch/worst_engine"))
            and not name.endswith("/time")
        }
        for line in metrics
    ]


def assert_pieces_equal_the_whole(config: Config, folder: Path, stops: Sequence[int], available: Any = None) -> None:
    """Assert that a run in `folder`/pieces that stops after these steps equals one in `folder`/whole without stops."""
    whole, pieces = (config | {"run_dir": str(folder / name)} for name in ("whole", "pieces"))
    assert train(whole, available=available).status == "finished"
    for stop in stops:
        assert train(pieces, stop_after=stop, available=available).step == stop
    assert train(pieces, available=available).status == "finished"
    assert_same_run(folder / "pieces", folder / "whole")


def kept_steps(run_dir: PathLike[str] | str) -> list[int]:
    """Return the steps of the checkpoints in a run directory."""
    return sorted(int(path.name.removeprefix("step-")) for path in (Path(run_dir) / "checkpoints").glob("step-*"))


def assert_same_run(one: PathLike[str] | str, other: PathLike[str] | str) -> None:
    """Two run directories have the same weights and metrics, except times, bit for bit."""
    assert deterministic(read_metrics(one)) == deterministic(read_metrics(other))
    assert_same_weights(one, other)


def assert_same_weights(one: PathLike[str] | str, other: PathLike[str] | str) -> None:
    """The newest checkpoints of two run directories hold the same weights, bit for bit."""
    from safetensors.torch import load_file

    left, right = (
        load_file(sorted(Path(run_dir, "checkpoints").glob("step-*"))[-1] / "backend/model.safetensors")
        for run_dir in (one, other)
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def assert_metrics_close(
    lines: Sequence[Mapping[str, float]],
    expected: Sequence[Mapping[str, float]],
    tolerance: float,
    names: Sequence[str] = (),
) -> None:
    """Assert that metrics are equal within this tolerance, relative for values above 1.

    names: the metrics, by default all that both have.
    """
    for line, other in zip(lines, expected, strict=True):
        compared = [name for name in other if name in (names or line)]
        assert {"loss", "grad_norm", "lr"} <= set(compared)
        values = {name: (line[name], other[name]) for name in compared}
        far = {name: pair for name, pair in values.items() if pair != pytest.approx(pair[::-1], tolerance, tolerance)}
        assert not far, f"step {line['step']}: {far}"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_scorer(folder: Path, base: str | PathLike[str]) -> Path:
    """Write a reward model with a random score head on the layers of `base`, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def write_pairs(path: Path, count: int, seed: int) -> Path:
    """Write rows of preference pairs. Digits in order are preferred to digits in reverse."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        digits = sorted(rng.sample("0123456789", 3))
        prompt = [{"role": "user", "content": f"sort {''.join(rng.sample(digits, 3))}"}]
        answers = {"chosen": "".join(digits), "rejected": "".join(reversed(digits))}
        rows.append(
            {"prompt": prompt, **{side: [{"role": "assistant", "content": text}] for side, text in answers.items()}}
        )
    return write_rows(path, rows)


def on_ranks(config: dict[str, Any], ranks: int = 2, *, backend: str = "fsdp", **settings: Any) -> dict[str, Any]:
    """Return the config with a backend of several ranks on CPU."""
    return config | {
        "plugins": [*config.get("plugins", ()), f"{backend}_backend"],
        "backend": {"name": backend, "device": "cpu", "ranks": ranks, "num_threads": 1, **settings},
    }


def ppo_config(config: Mapping[str, Any]) -> Config:
    """Return the config with PPO and its whole update path: critic, reference, correction and temperature."""
    return {name: value for name, value in config.items() if name not in ("batch_size", "collator")} | {
        "schedule": "constant",
        "source": {
            "name": "rollouts",
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "environment": {"name": "single_turn", "rewards": "exact_match"},
            "engine": {"name": "in_process", "deterministic": True},
            "advantage": "gae",
            "correction": "tis",
            "kl_in_reward": {"coefficient": 0.1},
            # Random weights earn no reward, but they lose some.
            "overlong": {"buffer_tokens": 8},
            "sampling": {"temperature": 0.8, "max_new_tokens": 8},
        },
        "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 2},
        "loss": {"name": "ppo", "kl": {"coefficient": 0.01}},
        "critic": {"minibatches": {"prompts_per_minibatch": 1}, "optimizer": {"learning_rate": 1e-3}},
    }


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 120, every_s: float = 0.02) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(every_s)


def anonymous_bytes(pid: int | str = "self") -> int:
    """Memory that is the process's own; pages of mapped files can be given back at any time."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def train_command(config: Path) -> list[str]:
    return [sys.executable, "-m", "spurline.cli", "train", str(config)]


def config_to_kill(config: Mapping[str, Any], held_out: Path, steps: int) -> Config:
    """Return a longer run with dropout, evaluations and checkpoints at different steps."""
    return {
        **config,
        "steps": steps,
        "checkpoint": {"every_steps": 3},
        "evaluation": {"every_steps": 10},
        "report": {"enabled": False},
        "data": {**config["data"], "eval": str(held_out)},
        "model": {**config["model"], "config_overrides": {"attention_dropout": 0.1}},
    }


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class KillableProcess:
    """`spurline train CONFIG` in a process of its own. Made by the fixture `killable_process`."""

    def __init__(self, runs: WarmRuns, config: Path, run_dir: Path, **options: Any) -> None:
        self._metrics, self._log = run_dir / "metrics.jsonl", config.with_suffix(".log")
        self._process = runs.start("train", config, **{"output": self._log, **options})
        self.pid, self.poll, self.wait = self._process.pid, self._process.poll, self._process.wait

    def said(self) -> str:
        """Return the output of the process."""
        return self._log.read_text()

    def wait_for_steps(self, steps: int | None, then_s: float = 0.0) -> None:
        """Wait until the run trains and has done this number of steps, and then `then_s` longer.

        If `steps` is None, wait for an instant of the start: `then_s`, or less if a step is done before.
        """
        before = num_lines(self._metrics)
        if steps is None:
            deadline = time.monotonic() + then_s
            while time.monotonic() < deadline and num_lines(self._metrics) == before:
                time.sleep(0.002)
        else:
            # A resume first removes the lines of the steps that no checkpoint covers.
            for more in (1, steps):
                wait_for(
                    lambda: self.poll() is not None or abs(num_lines(self._metrics) - before) >= more,  # noqa: B023
                    f"{steps} steps",
                    every_s=0.002,
                )
                before = num_lines(self._metrics)
            time.sleep(then_s)
        assert self.poll() is None, f"the run ended before it could be killed: {self.said()}"

    def kill(self, wait_s: float = 10.0) -> None:
        """Kill it with SIGKILL, and wait for its end."""
        self._process.kill()
        self.wait(wait_s)
