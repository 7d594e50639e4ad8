"""Reinforcement learning with all of the update path: critic, reference, correction, temperature, fixed norm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import assert_same_weights, deterministic, read_metrics


@pytest.fixture
def actor_critic(base_config: dict[str, Any]) -> dict[str, Any]:
    kept = {name: base_config[name] for name in ("model", "data", "optimizer", "backend", "checkpoint")}
    return {
        **kept,
        "run_dir": base_config["run_dir"],
        "steps": 4,
        "schedule": "constant",
        "source": {
            "name": "rollouts",
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "environment": {"name": "single_turn", "rewards": "exact_match"},
            "advantage": "gae",
            "correction": "tis",
            "kl_in_reward": {"coefficient": 0.1},
            # Random weights earn no reward, but they lose some.
            "overlong": {"buffer_tokens": 8},
            "sampling": {"temperature": 0.8, "max_new_tokens": 8},
        },
        "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 4, "update_epochs": 2},
        "loss": {"name": "ppo", "kl": {"coefficient": 0.01}},
        "reduction": {"name": "fixed_norm", "length": 8},
        "critic": {"minibatches": {"prompts_per_minibatch": 1}, "optimizer": {"learning_rate": 1e-3}},
    }


def test_the_plan_says_the_whole_objective_in_words(
    actor_critic: dict[str, Any], write_config: Callable[..., Path], spurline: Callable[..., tuple[int, str, str]]
) -> None:
    code, output, error = spurline("plan", write_config(actor_critic))
    assert code == 0, error
    words = " ".join(output.split())
    for sentence in (
        "GAE: a critic's temporal differences",
        "TIS: weigh each token by its probability ratio",
        "PPO: minus advantage times probability ratio",
        "Reduction fixed_norm: the sum over an optimizer step is divided by 8 tokens for each trajectory.",
        "Critic: half the squared difference of its value and the return",
    ):
        assert sentence in words
    assert "8 optimizer steps" in words


def test_policy_and_critic_train_and_a_resumed_run_is_the_uninterrupted_one(
    actor_critic: dict[str, Any],
    write_config: Callable[..., Path],
    spurline: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    path = write_config(actor_critic)
    assert spurline("train", path, "--set", f"run_dir={whole}")[0] == 0
    assert spurline("train", path, "--set", f"run_dir={resumed}", "--set", "steps=2")[0] == 0
    assert spurline("train", path, "--set", f"run_dir={resumed}")[0] == 0
    lines = read_metrics(whole)
    assert deterministic(read_metrics(resumed)) == deterministic(lines)
    assert_same_weights(whole, resumed)
    for line in lines:
        assert line["critic/grad_norm"] > 0
        assert line["grad_norm"] > 0
        # The engine samples from what the trainer computes at the same temperature.
        assert line["mismatch/logprob_diff/max"] < 1e-4
        assert line["correction/factor"] == pytest.approx(1.0, abs=1e-3)
    assert (whole / "checkpoints/step-00000004/backend/critic/optimizer.safetensors").exists()
