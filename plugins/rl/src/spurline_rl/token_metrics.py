"""Numbers about the trained tokens of a batch: how far trainer and engine disagree, and how advantages spread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import TrainingBatch
from spurline_rl.losses.log_ratios import COLUMNS
from spurline_rl.losses.policy_loss import LARGEST_LOG_RATIO

_PERCENTILES = (1, 50, 99)


def mismatch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return how far the trainer's logprobs are from those the tokens were sampled with; nothing without both.

    These are `mismatch/logprob_diff` (mean of |trainer - rollout|, nats) and its `/max`, `mismatch/kl` (the k3 estimate
    of KL(rollout || trainer), Schulman 2020), and `mismatch/ratio_pN`, percentiles of the importance ratio.
    """
    trained = batch.tokens["loss_weights"].numpy() != 0
    if not trained.any() or any(name not in batch.tokens for name in COLUMNS):
        return {}
    old, rollout = (batch.tokens[name].numpy()[trained] for name in COLUMNS)
    with np.errstate(invalid="ignore"):  # two logprobs of -inf have no ratio, which shows as NaN
        difference = np.subtract(old, rollout).astype(np.float64)
    ratio = np.exp(np.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    distance = np.abs(difference)
    percentiles = zip(_PERCENTILES, np.percentile(ratio, _PERCENTILES).tolist(), strict=True)
    return {
        "mismatch/logprob_diff": float(distance.mean()),
        "mismatch/logprob_diff/max": float(distance.max()),
        "mismatch/kl": float((ratio - 1 - difference).mean()),
        **{f"mismatch/ratio_p{percent}": value for percent, value in percentiles},
    }


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return `advantage/mean`, `advantage/std` and the extremes over trained tokens."""
    trained = batch.tokens["loss_weights"].numpy() != 0
    values: NDArray[np.float64] = batch.tokens["advantages"].numpy()[trained].astype(np.float64)
    if not len(values):
        return {}
    return {
        "advantage/mean": float(values.mean()),
        "advantage/std": float(values.std()),
        "advantage/max": float(values.max()),
        "advantage/min": float(values.min()),
    }
