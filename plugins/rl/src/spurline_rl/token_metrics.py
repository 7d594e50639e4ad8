"""Metrics of the trained tokens of a batch: the mismatch of trainer and engine, and the spread of advantages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import TrainingBatch
from spurline_rl.losses.log_ratios import COLUMNS, log_ratios_in_blocks
from spurline_rl.losses.policy_loss import LARGEST_LOG_RATIO

_PERCENTILES = (1, 50, 99)


def mismatch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return metrics of the difference between the trainer's and the engine's logprobs; {} if one is missing.

    These are `mismatch/logprob_diff` (mean of |trainer - rollout|, nats) and its `/max`, `mismatch/kl` (the k3 estimate
    of KL(rollout || trainer), Schulman 2020), and `mismatch/ratio_pN`, percentiles of the importance ratio.
    """
    if any(name not in batch.tokens for name in COLUMNS) or not (count := batch.num_loss_tokens):
        return {}
    ratios, found = np.empty(count), 0
    distance, largest, kl = 0.0, 0.0, 0.0
    for _, block in log_ratios_in_blocks(batch):
        difference = block.values.numpy()
        ratio = ratios[found : found + len(difference)]
        found += len(difference)
        np.exp(np.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO, out=ratio), out=ratio)
        kl += float((ratio - 1 - difference).sum())
        distances = np.abs(difference)
        distance += float(distances.sum())
        largest = np.maximum(largest, distances.max(initial=0.0))
    percentiles = np.percentile(ratios, _PERCENTILES, overwrite_input=True).tolist()
    return {
        "mismatch/logprob_diff": distance / count,
        "mismatch/logprob_diff/max": float(largest),
        "mismatch/kl": kl / count,
        **{f"mismatch/ratio_p{percent}": value for percent, value in zip(_PERCENTILES, percentiles, strict=True)},
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
