"""State of a plugin over kills and resumes: the average of the example plugin, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_plugins import install_plugin
from run_helpers import Config, KillableProcess, assert_same_run, config_to_kill, train
from safetensors.torch import load_file

SOURCE = Path(__file__).parents[2] / "examples" / "plugin_ema" / "src"
KILLS = 5


@pytest.fixture
def ema_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the example plugin."""
    install_plugin(tmp_path / "site", monkeypatch, "ema", "spurline_plugin_ema.plugin", SOURCE)


def average_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the average that the newest checkpoint holds."""
    return load_file(sorted((run_dir / "checkpoints").glob("step-*"))[-1] / "hooks/ema/weights.safetensors")


@pytest.mark.processes
@pytest.mark.usefixtures("ema_installed")
def test_the_average_of_the_tutorial_is_that_of_the_uninterrupted_run_after_five_kills(
    base_config: Config, spurline_chat_file: Path, killable_process: Callable[..., KillableProcess]
) -> None:
    ema = {"plugins": ["ema"], "ema": {"decay": 0.9, "export": False}}
    config = config_to_kill(base_config | ema, spurline_chat_file, 12 * KILLS)
    whole = train(config, name="whole")
    instants = random.Random(11)
    for _ in range(KILLS):
        process = killable_process(config)
        process.wait_for_steps(instants.randint(1, 8), instants.uniform(0, 0.03))
        process.kill()
    run = train(config)
    one, other = average_of(run.run_dir), average_of(whole.run_dir)
    assert one.keys() == other.keys()
    assert all(name.startswith("weights/") for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [line["step"] for line in run.lines if "ema/loss" in line] == [10, 20, 30, 40, 50, 60]
    assert_same_run(run, whole)
