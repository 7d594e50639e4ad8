"""What a run of reinforcement learning leaves behind, for tests of what people see of it."""

from __future__ import annotations

from typing import Any


def rl_metrics(step: int, **changes: float) -> dict[str, Any]:
    """One line of metrics.jsonl with every number of a healthy step of one update. `changes`: `reward__mean=0.5`."""
    reward = 0.4 + 0.01 * step
    line: dict[str, Any] = {
        "step": step,
        "epoch": step / 50,
        "loss": 1e-4,
        "grad_norm": 0.5,
        "lr": 5e-4,
        "tokens": 8000,
        "loss_tokens": 4000,
        "time/batch": 1.5,
        "time/generate": 1.0,
        "time/look_back": 0.25,
        "time/forward_backward": 0.4,
        "time/optimizer": 0.1,
        "time/step": 2.0,
        "rollout/tokens": 4000,
        "reward/mean": reward,
        "reward/std": 0.3,
        "rewards/exact_match": reward,
        "groups/zero_variance": 0.25,
        "groups/drawn": 32,
        "groups/filtered": 0,
        "groups/quarantined": 0,
        "groups/retries": 0,
        "groups/refill_missing": 0,
        "response/length": 16,
        "response/length/max": 20,
        "response/turns": 1,
        "response/length_stop": 16,
        "response/share_stop": 1,
        "mismatch/logprob_diff": 0.002,
        "mismatch/logprob_diff/max": 0.4,
        "mismatch/kl": 1e-5,
        "mismatch/ratio_p1": 0.98,
        "mismatch/ratio_p50": 1,
        "mismatch/ratio_p99": 1.02,
        "advantage/mean": 0,
        "advantage/std": 0.9,
        "advantage/max": 2.5,
        "advantage/min": -2.5,
        "policy/clip_fraction_low": 0,
        "policy/clip_fraction_high": 0,
        "policy/ratio": 1,
        "policy/ratio/max": 1,
        "policy/ratio/min": 1,
        "policy/kl_old": 0,
        "policy/entropy": 0.3,
    }
    return line | {name.replace("__", "/"): value for name, value in changes.items()}


RL_SUMMARY: dict[str, Any] = {
    "data": {
        "train": {
            "prompts": 2400,
            "sources": {"sort": 2000, "count": 400},
            "read_in_part": False,
            "samples_per_epoch": 2400,
            "samples_per_step": 32,
            "step_of": "32 prompts x 8 attempts",
            "objective": ["GRPO: <each> return less the mean of its group."],
        },
        "eval": {"prompts": 200, "sources": {"sort": 200}, "read_in_part": False},
    },
    "status": "finished",
    "total_steps": 8,
}
