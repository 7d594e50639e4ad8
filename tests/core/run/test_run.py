"""Whole runs with core alone: its loop, checkpoints, hooks, trackers and commands need nothing but these seams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bare_components
import numpy as np
import pytest
import torch
from bare_components import Noted, Table
from fake_plugins import FakePlugins
from run_helpers import at, fail, train
from safetensors.torch import load_file

from spurline import Run, load_config
from spurline.cli import main
from spurline.config.loading import LoadedConfig
from spurline.errors import (
    CheckpointError,
    ConfigError,
    HookFailedError,
    NonFiniteLossError,
    RunDirectoryError,
    UserError,
)
from spurline.plugins import ComponentRegistrar, hookimpl
from spurline.plugins.registry import Registry
from spurline.protocols.evaluation import EvaluationConfig
from spurline.run.evaluations.evaluation import DataEvaluation
from spurline.trackers.jsonl import read_metrics

pytestmark = pytest.mark.usefixtures("bare")

Config = dict[str, Any]


@pytest.fixture
def config(lines: Path, tmp_path: Path) -> Config:
    """Eight steps with momentum, an evaluation at every second and a checkpoint at every third."""
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": "none"},
        "data": {"train": str(lines), "eval": {"path": str(lines), "split": "train[:5]"}},
        "batch_size": 4,
        "steps": 8,
        "optimizer": {"learning_rate": 0.5},
        "schedule": {"name": "falling", "min_ratio": 0.1},
        "evaluation": {"every_steps": 2},
        "checkpoint": {"every_steps": 3},
    }


def recorded(run_dir: Path | str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what clocks measured."""
    kept = read_metrics(Path(run_dir) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if "time" not in name} for line in kept]


def weights(run_dir: Path | str) -> dict[str, torch.Tensor]:
    """What the backend kept in the newest checkpoint."""
    newest = max((Path(run_dir) / "checkpoints").glob("step-*"))
    return load_file(newest / "backend" / "table.safetensors")


def summary(config: Config) -> dict[str, Any]:
    return json.loads((Path(config["run_dir"]) / "summary.json").read_text())


def test_a_run_learns_and_records_what_it_did(config: Config) -> None:
    result = train({**config, "trackers": ["noted"]})
    found = recorded(config["run_dir"])
    assert (result.status, result.step, [line["step"] for line in found]) == ("finished", 8, [*range(1, 9)])
    assert found[-1]["loss"] < found[0]["loss"]
    assert [line["step"] for line in found if "eval/loss" in line] == [2, 4, 6, 8]
    assert [step for step, _ in Noted.told] == [*range(1, 9)]
    assert found[0]["lr"] == 0.5
    assert found[-1]["lr"] < 0.2
    facts = summary(config)
    assert (facts["status"], facts["total_steps"], facts["parameters"]) == ("finished", 8, 256)
    assert facts["versions"]["bare-components"] == "1.2.3"
    assert facts["data"]["train"]["samples"] == 24
    assert [path.name for path in sorted((Path(config["run_dir"]) / "checkpoints").glob("step-*"))] == [
        "step-00000006",
        "step-00000008",
    ]


@pytest.mark.parametrize("stop", ["signal", "request", "failure"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(config: Config, tmp_path: Path, stop: str) -> None:
    whole = {**config, "run_dir": str(tmp_path / "whole")}
    train(whole)
    loaded = load_config(config)
    run = Run(loaded)
    act: Callable[[], object] = {
        "signal": lambda: signal.raise_signal(signal.SIGTERM),
        "request": lambda: [run.request_stop(reason) for reason in ("enough", "a later reason")],
        "failure": fail,
    }[stop]
    loaded.host.attach(SimpleNamespace(on_step_start=hookimpl(at(5, act))), "test/stop")
    if stop == "failure":
        with pytest.raises(HookFailedError):
            run.train()
    else:
        stopped = run.train()
        assert (stopped.status, stopped.step) == ("stopped", 5)
        reason = "enough" if stop == "request" else None
        assert (stopped.stop_reason, summary(config).get("stop_reason")) == (reason, reason)
    assert train(config).status == "finished"
    assert "stop_reason" not in summary(config)
    assert recorded(config["run_dir"]) == recorded(whole["run_dir"])
    one, other = weights(config["run_dir"]), weights(whole["run_dir"])
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_has_finished_is_not_trained_again(config: Config) -> None:
    train(config)
    before = recorded(config["run_dir"])
    result = train(config, on_step_start=at(1, pytest.fail, "trained"))
    assert (result.status, result.step) == ("finished", 8)
    assert recorded(config["run_dir"]) == before
    # More steps are trained from where it ended.
    assert train({**config, "steps": 10}).step == 10


def test_other_data_and_other_settings_are_refused_on_a_resume(config: Config, lines: Path) -> None:
    train(config, stop_after=4)
    with pytest.raises(CheckpointError, match=r"rate: 0\.5 -> 0\.25(.|\n)*allow_change=\['optimizer\.learning_rate'\]"):
        train({**config, "optimizer": {"learning_rate": 0.25}})
    text = lines.read_text()
    lines.write_text(text.replace("line 7", "line 8"))
    with pytest.raises(CheckpointError, match="The training data is another one"):
        train(config)
    lines.write_text(text)
    changed = {**config, "optimizer": {"learning_rate": 0.25}}
    assert train(changed, allow_change="optimizer.learning_rate").status == "finished"
    for choice, told in (("never", "already has checkpoints"), ("yes", r"no folder of this name(.|\n)*step-00000006")):
        with pytest.raises(UserError, match=told):
            train(config, resume=choice)


def test_a_loss_that_is_not_finite_ends_the_run_and_the_last_checkpoint_stands(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NonFiniteLossError):
        train(config, on_step_start=at(5, monkeypatch.setattr, Table, "is_next_lost", True))
    assert summary(config)["status"] == "failed"
    assert [line["step"] for line in recorded(config["run_dir"])] == [1, 2, 3, 4]
    monkeypatch.setattr(Table, "is_next_lost", False)
    assert train(config).status == "finished"
    assert [line["step"] for line in recorded(config["run_dir"])] == [*range(1, 9)]


class Average:
    """A plugin's mean of the table over all steps, which a checkpoint keeps, and a metric of it."""

    def __init__(self) -> None:
        self.sum = np.zeros(256, np.float64)
        self.called: list[str] = []

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._run = run
        run.keep_state("average", self)
        self.called.append(f"start {run.state.step}")

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Any, Mapping[str, float]]:
        metrics = yield
        ((_, table),) = self._run.backend.named_weights()
        self.sum += table.numpy()
        return {**metrics, "average/norm": float(np.linalg.norm(self.sum))}

    @hookimpl
    def on_eval_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.called.append(f"eval {step}")

    @hookimpl
    def on_checkpoint_saved(self, step: int, path: Path) -> None:
        self.called.append(f"saved {step}")
        assert path.is_dir()

    @hookimpl
    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.called.append(f"end {error}")

    @hookimpl
    def on_run_recorded(self, run: Run) -> Mapping[str, Path]:
        assert summary({"run_dir": run.directory.path})["status"] in ("finished", "stopped")
        return {"average": run.directory.path / "average.txt"}

    def state_dict(self) -> dict[str, object]:
        return {"sum": self.sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sum = state["sum"] + 0


def test_hooks_see_every_point_of_a_run_and_keep_their_state_over_a_resume(config: Config, tmp_path: Path) -> None:
    whole, average = {**config, "run_dir": str(tmp_path / "whole")}, Average()
    result = train(whole, average)
    assert average.called == [
        "start 0",
        *("eval 2", "saved 3", "eval 4", "eval 6", "saved 6", "eval 8", "saved 8"),
        "end None",
    ]
    assert result.files == {"average": tmp_path / "whole" / "average.txt"}
    train(config, Average(), stop_after=4)
    resumed = Average()
    train(config, resumed)
    assert resumed.called[0] == "start 4"
    assert np.array_equal(resumed.sum, average.sum)
    assert recorded(config["run_dir"]) == recorded(whole["run_dir"])


def test_a_loss_beside_the_reference_model_begins_at_zero_and_falls(config: Config) -> None:
    train({**config, "loss": "beside_reference"})
    found = recorded(config["run_dir"])
    assert found[0]["loss"] == pytest.approx(0, abs=1e-6)
    assert found[-1]["loss"] < -0.1


@pytest.mark.parametrize("changed", [{"collator": "padded"}, {"reduction": "sequence_mean"}, {"loss": "squared"}])
def test_collators_reductions_and_losses_are_exchanged_without_the_others(config: Config, changed: Config) -> None:
    assert train({**config, **changed}).status == "finished"
    found = recorded(config["run_dir"])
    assert found[-1]["loss"] < found[0]["loss"]


def test_only_one_run_has_a_directory(config: Config) -> None:
    def again() -> None:
        with pytest.raises(RunDirectoryError):
            train(config)

    assert train(config, on_step_start=at(2, again)).status == "finished"


def test_the_command_trains_and_says_where_it_left_what(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(config["run_dir"]).parent / "run.yaml"
    path.write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(path), "--set", "steps=3"])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert "step 3/3" in said.out + said.err
    assert summary(config)["total_steps"] == 3


def test_the_list_of_plugins_shows_what_is_installed_and_enabled(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(config["run_dir"]).parent / "run.yaml"
    path.write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        main(["plugins"])
    assert ended.value.code == 0
    assert "models  1.2.3  (bare-components, by default)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plugins", "--config", str(path)])
    shown = capsys.readouterr().out
    assert "  backend: table, other_table" in shown
    assert "  commands: shout" in shown


ALONE = """
import importlib.metadata, sys
import bare_components
importlib.metadata.entry_points = bare_components.metadata_with(bare_components.entry_points)
from spurline import Run, load_config
assert Run(load_config(CONFIG)).train().status == "finished"
print(sorted(name for name in sys.modules if name.startswith("spurline_") or name in HEAVY))
"""


@pytest.mark.processes
def test_a_run_imports_no_other_package(config: Config) -> None:
    heavy = ("transformers", "datasets", "pandas", "plotly", "peft", "ray")
    support = str(Path(bare_components.__file__).parent)
    paths = [support, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    done = subprocess.run(
        [sys.executable, "-c", ALONE.replace("CONFIG", repr(config)).replace("HEAVY", repr(heavy))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


class PlainConfig(EvaluationConfig):
    """An evaluation without further settings."""

    name: str = "plain"


def with_plain_evaluation(config: Config, plugins: FakePlugins, factory: str) -> LoadedConfig:
    def register(registry: ComponentRegistrar) -> None:
        registry.add(PlainConfig, factory, default=True)

    return load_config({**config, "plugins": ["plain"]}, available=plugins.add("plain", register=register))


def test_the_default_evaluation_may_be_one_without_batches(config: Config, plugins: FakePlugins) -> None:
    assert "eval/loss" in Run(with_plain_evaluation(config, plugins, "bare_components:HeldOut")).train().metrics
    config = {**config, "run_dir": config["run_dir"] + "2", "evaluation": {"batch_size": 2}}
    with pytest.raises(ConfigError, match=r"evaluation\.batch_size is given, but 'plain' has no such setting"):
        Run(with_plain_evaluation(config, plugins, "bare_components:HeldOut")).train()


def test_held_out_data_that_nothing_measures_names_a_plugin_that_is_left_out() -> None:
    config: Any = SimpleNamespace(data=SimpleNamespace(eval=()))
    context: Any = SimpleNamespace(run=SimpleNamespace(host=SimpleNamespace(registry=Registry())))
    with pytest.raises(ConfigError, match="Plugin 'models' does: take -models out of plugins"):
        DataEvaluation(config, context)
