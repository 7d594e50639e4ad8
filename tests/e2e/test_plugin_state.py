"""State of a plugin over kills and resumes: the average of the example plugin, bit for bit."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import (
    Config,
    WriteConfig,
    assert_same_weights,
    config_to_kill,
    deterministic,
    read_metrics,
    train,
    train_and_kill,
)
from safetensors.torch import load_file
from warm_runs import WarmRuns

SOURCE = Path(__file__).parents[2] / "examples" / "plugin_ema" / "src"
KILLS = 5


@pytest.fixture
def ema_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example plugin as its installation looks to this process and to those it starts."""
    installed = tmp_path / "site" / "spurline_plugin_ema-0.1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: spurline-plugin-ema\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text("[spurline.plugins]\nema = spurline_plugin_ema.plugin\n")
    paths = [str(SOURCE), str(installed.parent)]
    for path in paths:
        monkeypatch.syspath_prepend(path)
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, *before]))


def average_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """What the newest checkpoint holds."""
    return load_file(sorted((run_dir / "checkpoints").glob("step-*"))[-1] / "hooks/ema/weights.safetensors")


@pytest.mark.processes
@pytest.mark.usefixtures("ema_installed")
def test_the_average_of_the_tutorial_is_that_of_the_uninterrupted_run_after_five_kills(
    base_config: Config,
    write_config: WriteConfig,
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    tmp_path: Path,
) -> None:
    ema = {"plugins": ["ema"], "ema": {"decay": 0.9, "export": False}}
    config = config_to_kill(base_config | ema, spurline_chat_file, 12 * KILLS)
    whole = config | {"run_dir": str(tmp_path / "whole")}
    train(whole)
    path = write_config(config)
    run_dir = Path(config["run_dir"])
    random_instants = random.Random(11)
    for _ in range(KILLS):
        steps, wait_s = random_instants.randint(1, 8), random_instants.uniform(0, 0.03)
        train_and_kill(warm_runs, path, run_dir / "metrics.jsonl", steps=steps, wait_s=wait_s)
    assert train(path).status == "finished"
    one, other = average_of(run_dir), average_of(tmp_path / "whole")
    assert one.keys() == other.keys()
    assert all(name.startswith("weights/") for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert_same_weights(run_dir, tmp_path / "whole")
    recorded = read_metrics(run_dir)
    assert [line["step"] for line in recorded if "ema/loss" in line] == [10, 20, 30, 40, 50, 60]
    assert deterministic_without_times(recorded) == deterministic_without_times(read_metrics(tmp_path / "whole"))


def deterministic_without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines without wall times, those of the average's evaluation either."""
    return [{name: value for name, value in line.items() if name != "ema/time"} for line in deterministic(metrics)]
