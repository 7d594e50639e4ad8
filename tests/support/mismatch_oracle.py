"""Corrections and metrics of tokens over whole `[rows, length]` columns.

`spurline_rl.losses.corrections` must give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch, segment_numbers, sums_by_number


def corrected(batch: TrainingBatch, name: str, config: Any) -> tuple[Tensor, dict[str, float]]:
    """Factors float32 [R, L] and metrics of a correction of core. config: its settings."""
    if name == "tis":
        ratios = _log_ratios(batch, config.level)
        largest = math.log(config.cap) if config.cap is not None else math.inf
        return _with_metrics(batch, _exp(ratios.clamp(max=largest)), truncated=ratios > largest)
    level = config.level if name == "mis" else name
    ratios = _log_ratios(batch, level)
    bounds = torch.tensor([config.low, config.high], dtype=torch.float64).log()
    accepted = (ratios >= bounds[0]) & (ratios <= bounds[1])
    factors = torch.where(accepted, _exp(ratios), 0.0) if name == "mis" else accepted.double()
    return _with_metrics(batch, factors, rejected=~accepted)


def mismatch(batch: TrainingBatch) -> dict[str, float]:
    if not {"old_logprobs", "rollout_logprobs"} <= batch.tokens.keys():
        return {}
    trained = (batch.tokens["loss_weights"] != 0).numpy()
    if not trained.any():
        return {}
    difference = (batch.tokens["old_logprobs"].double() - batch.tokens["rollout_logprobs"].double()).numpy()[trained]
    ratio = np.exp(np.clip(difference, -20.0, 20.0))
    return {
        "mismatch/logprob_diff": float(np.abs(difference).mean()),
        "mismatch/logprob_diff/max": float(np.abs(difference).max()),
        "mismatch/kl": float((ratio - 1 - difference).mean()),
        **{f"mismatch/ratio_p{percent}": float(np.percentile(ratio, percent)) for percent in (1, 50, 99)},
    }


def advantages(batch: TrainingBatch) -> dict[str, float]:
    trained = (batch.tokens["loss_weights"] != 0).numpy()
    values = batch.tokens["advantages"].numpy()[trained].astype(np.float64)
    if not len(values):
        return {}
    return {
        "advantage/mean": float(values.mean()),
        "advantage/std": float(values.std()),
        "advantage/max": float(values.max()),
        "advantage/min": float(values.min()),
    }


def _exp(values: Tensor) -> Tensor:
    return values.clamp(-20.0, 20.0).exp()


def _log_ratios(batch: TrainingBatch, level: str) -> Tensor:
    trained = batch.tokens["loss_weights"] != 0
    old, rollout = (batch.tokens[name].double() for name in ("old_logprobs", "rollout_logprobs"))
    ratios = torch.where(trained, old - rollout, 0.0)
    if level == "token":
        return ratios
    numbers = segment_numbers(batch)
    sums = sums_by_number(ratios, numbers)
    if level == "geometric":
        sums = sums / sums_by_number(trained, numbers).clamp(min=1)
    return torch.where(trained, sums[numbers], 0.0)


def _with_metrics(batch: TrainingBatch, factors: Tensor, **shares: Tensor) -> tuple[Tensor, dict[str, float]]:
    trained = batch.tokens["loss_weights"] != 0
    count = max(int(trained.sum()), 1)
    metrics = {f"correction/{name}": float((where & trained).sum()) / count for name, where in shares.items()}
    metrics["correction/factor"] = float(factors[trained].sum()) / count
    return factors.float(), metrics
