"""Whole runs of reinforcement learning of a mixture of experts, with the experts that the engine chose."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import Config, assert_same_weights, deterministic, read_metrics, train

from spurline import load_config
from spurline.errors import ConfigError, ModelError
from spurline_models.testing import write_tiny_moe_model


@pytest.fixture
def replay_config(rl_config: Config, tmp_path: Path) -> Config:
    rl_config["model"] = {"path": str(write_tiny_moe_model(tmp_path / "experts"))}
    rl_config["source"]["router_replay"] = True
    return rl_config


@pytest.mark.parametrize("turns", ["separate", "merged"])
def test_rollouts_and_trainer_agree_and_a_resumed_run_is_the_uninterrupted_one(
    replay_config: Config, tmp_path: Path, turns: str
) -> None:
    replay_config["source"]["turns"] = turns
    whole = replay_config | {"run_dir": str(tmp_path / "whole"), "steps": 4}
    train(whole)
    lines = read_metrics(tmp_path / "whole")
    assert len(lines) == 4
    for line in lines:
        assert line["mismatch/logprob_diff/max"] < 1e-5
        assert line["grad_norm"] > 0
    for steps in (2, 4):
        train(replay_config | {"steps": steps})
    assert deterministic(read_metrics(replay_config["run_dir"])) == deterministic(lines)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_model_without_experts_is_refused_before_anything_is_generated(rl_config: Config) -> None:
    rl_config["source"]["router_replay"] = True
    with pytest.raises(ModelError, match=r"source.router_replay is true, and the model .* has no router that it knows"):
        train(rl_config)
    assert not (Path(rl_config["run_dir"]) / "metrics.jsonl").exists()


def test_a_backend_that_cannot_replay_is_a_problem_of_the_config(replay_config: Config) -> None:
    replay_config["backend"] = {**replay_config.get("backend", {}), "compile": True}
    with pytest.raises(ConfigError, match=r"router_replay is true, and backend 'local' with these settings"):
        load_config(replay_config)
