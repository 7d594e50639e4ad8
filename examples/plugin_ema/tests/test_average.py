"""Train a tiny model: the average follows the formula, and a resumed run continues it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spurline import Run, load_config
from spurline.errors import ConfigError
from spurline.plugins import hookimpl
from spurline.plugins.host import InstalledPlugin

# The tests name the plugin's module, so that they also run without an installed plugin. A user's config needs no such
# argument.
AVAILABLE = {"ema": InstalledPlugin("ema", "spurline_plugin_ema.plugin", "under-test", "0")}


@pytest.fixture
def config(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "plugins": ["ema"],
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "eval": str(spurline_chat_file)},
        "batch_size": 8,
        "steps": 4,
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"every_steps": 2},
        "backend": {"device": "cpu"},
        "ema": {"decay": 0.75},
    }


class Watch:
    """Records the weights before the first optimizer step and after each one. Ends the run after step `stop_after`."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self._stop_after = stop_after

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._run = run
        self.on_optimizer_step()

    @hookimpl
    def on_optimizer_step(self) -> None:
        backend: Any = self._run.backend
        self.weights.append({name: value.clone() for name, value in backend.trained_parameters().items()})

    @hookimpl
    def on_step_end(self, step: int) -> None:
        if step == self._stop_after:
            self._run.request_stop("the test has seen enough")


def train(config: dict[str, Any], watch: Watch) -> None:
    loaded = load_config(config, available=AVAILABLE)
    loaded.host.attach(watch, "watch")
    Run(loaded).train()


def saved_average(run_dir: str) -> dict[str, Tensor]:
    """Return the average in the newest checkpoint, by the names of the parameters."""
    checkpoint = sorted(Path(run_dir, "checkpoints").glob("step-*"))[-1]
    saved = load_file(checkpoint / "hooks/ema/weights.safetensors")
    return {name.removeprefix("weights/"): value for name, value in saved.items()}


def metrics(run_dir: str) -> list[dict[str, float]]:
    lines = Path(run_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if "time" not in name} for line in lines]


def test_the_average_follows_every_optimizer_step(config: dict[str, Any]) -> None:
    watch = Watch()
    train(config, watch)
    assert len(watch.weights) == 5
    average = saved_average(config["run_dir"])
    for name in average:
        expected = watch.weights[0][name]
        for weights in watch.weights[1:]:
            expected = 0.75 * expected + 0.25 * weights[name]
        torch.testing.assert_close(average[name], expected)


def test_its_loss_is_recorded_beside_the_models_own_and_its_weights_are_exported(config: dict[str, Any]) -> None:
    train(config, Watch())
    recorded = metrics(config["run_dir"])
    assert [line["step"] for line in recorded if "ema/loss" in line] == [2, 4]
    assert recorded[-1]["ema/loss"] != recorded[-1]["eval/loss"]
    average = saved_average(config["run_dir"])
    exported = load_file(Path(config["run_dir"], "ema_model", "model.safetensors"))
    assert all(torch.equal(exported[name].float(), value) for name, value in average.items())


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_a_stopped_run_continues_its_average_bit_for_bit(
    config: dict[str, Any], lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    config["backend"]["lora"] = lora
    whole = config | {"run_dir": str(tmp_path / "whole")}
    train(whole, Watch())
    for stop_after in (1, 3, None):
        train(config, Watch(stop_after))
    one, other = saved_average(config["run_dir"]), saved_average(whole["run_dir"])
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics(config["run_dir"]) == metrics(whole["run_dir"])


def test_a_backend_that_lends_no_parameters_is_refused(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from spurline.protocols.backend import BackendFacts
    from spurline_models.local.configs import LocalBackendConfig

    monkeypatch.setattr(LocalBackendConfig, "facts", BackendFacts())
    with pytest.raises(ConfigError, match="ema averages the trained parameters, and backend 'local' does not lend"):
        load_config(config, available=AVAILABLE)
