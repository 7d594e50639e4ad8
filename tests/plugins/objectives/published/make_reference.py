"""Write `reference.json`: one batch of tokens, with the losses and gradients that the papers' formulas give.

python tests/plugins/objectives/published/make_reference.py

This uses nothing of Spurline and no autograd. Gradients are with respect to the logprobs of the policy. The formulas:

dppo: equations 11 to 14 of arXiv:2602.04879, with the truncated ratio as a constant weight, as in the authors' code
(`compute_policy_loss_dppo_tv` and `compute_policy_loss_dppo_kl` in verl/trainer/ppo/core_algos.py).
kpop: a token is kept if both binary KL divergences are at most the threshold (ringtech.notion.site/kpop).
ppo_per_row: the clipped objective of arXiv:1707.06347.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

COUNT = 64
random.seed(20260204)


def near(logprob: float, spread: float) -> float:
    """Return a logprob below 0 near this one."""
    return min(logprob + random.gauss(0, spread), -1e-3)


def binary_kl(q: float, p: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def dppo(divergence: str, low: float, high: float, max_ratio: float) -> tuple[list[float], list[float]]:
    losses: list[float] = []
    gradients: list[float] = []
    for logprob, rollout, advantage in zip(
        batch["logprobs"], batch["rollout_logprobs"], batch["advantages"], strict=True
    ):
        p, q = math.exp(logprob), math.exp(rollout)
        distance = abs(p - q) if divergence == "tv" else binary_kl(q, p)
        kept = (distance <= high or p <= q) if advantage > 0 else (distance <= low or p >= q)
        weight = min(p / q, max_ratio) if kept else 0.0
        losses.append(-advantage * weight * logprob)
        gradients.append(-advantage * weight)
    return losses, gradients


def ppo_per_row() -> tuple[list[float], list[float]]:
    losses: list[float] = []
    gradients: list[float] = []
    names = ("logprobs", "old_logprobs", "advantages", "clip_low", "clip_high")
    columns = zip(*(batch[name] for name in names), strict=True)
    for logprob, old, advantage, low, high in columns:
        ratio = math.exp(logprob - old)
        clipped = min(max(ratio, 1 - low), 1 + high)
        losses.append(-min(ratio * advantage, clipped * advantage))
        gradients.append(-advantage * ratio if ratio * advantage <= clipped * advantage else 0.0)
    return losses, gradients


def kpop(threshold: float) -> list[float]:
    factors = []
    for old, rollout in zip(batch["old_logprobs"], batch["rollout_logprobs"], strict=True):
        p, q = math.exp(old), math.exp(rollout)
        kept = binary_kl(p, q) <= threshold and binary_kl(q, p) <= threshold
        factors.append(p / q if kept else 0.0)
    return factors


logprobs = [min(-1e-3, -random.expovariate(1.0)) for _ in range(COUNT)]
batch = {
    "logprobs": logprobs,
    "old_logprobs": [near(each, 0.3) for each in logprobs],
    "rollout_logprobs": [near(each, 0.5) for each in logprobs],
    "advantages": [random.gauss(0, 1) for _ in range(COUNT)],
    "clip_low": [random.choice([0.1, 0.2]) for _ in range(COUNT)],
    "clip_high": [random.choice([0.2, 0.28]) for _ in range(COUNT)],
}
settings = {"tv": (0.15, 0.1, 1.5), "kl": (0.02, 0.05, 2.0)}
wanted = {f"dppo {name}": dppo(name, *values) for name, values in settings.items()} | {
    "ppo_per_row": ppo_per_row(),
    "kpop": kpop(0.03),
}
path = Path(__file__).with_name("reference.json")
path.write_text(json.dumps({"batch": batch, "settings": settings, "wanted": wanted}) + "\n", encoding="utf-8")
