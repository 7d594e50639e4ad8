"""Reinforcement learning with all of the update path: critic, reference, correction, temperature, fixed norm."""

from __future__ import annotations

import pytest
from run_helpers import Config, Spurline, assert_same_run, train


@pytest.fixture
def actor_critic(base_config: Config) -> Config:
    return {name: base_config[name] for name in ("run_dir", "model", "data", "optimizer", "backend", "checkpoint")} | {
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


def test_the_plan_says_the_whole_objective_in_words(actor_critic: Config, spurline: Spurline) -> None:
    code, output, error = spurline("plan", actor_critic)
    assert code == 0, error
    words = " ".join(output.split())
    for part in ("GAE: ", "TIS: ", "PPO: minus advantage", "Critic: half", "8 optimizer steps"):
        assert part in words


def test_policy_and_critic_train_and_a_resumed_run_is_the_uninterrupted_one(actor_critic: Config) -> None:
    whole = train(actor_critic, name="whole")
    train(actor_critic, steps=2)
    assert_same_run(train(actor_critic), whole)
    for line in whole.lines:
        assert line["critic/grad_norm"] > 0
        assert line["grad_norm"] > 0
        # The engine samples from what the trainer computes at the same temperature.
        assert line["mismatch/logprob_diff/max"] < 1e-4
        assert line["correction/factor"] == pytest.approx(1.0, abs=1e-3)
    assert (whole.run_dir / "checkpoints/step-00000004/backend/critic/optimizer.safetensors").exists()
