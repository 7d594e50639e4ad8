"""How far trainer and engine disagree about the tokens of a batch: what every correction starts from.

    rho_t = old_logprobs_t - rollout_logprobs_t                             token
    sum of rho over the segment                                             sequence: log of the product of the ratios
    mean of rho over the segment                                            geometric

Only tokens with loss count. Segments are found by `segment_ids`, so packed rows give what separate rows give.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch, segment_numbers, sums_by_number
from spurline.errors import DataError, listing
from spurline.losses.policy_loss import LARGEST_LOG_RATIO
from spurline.protocols.correction import Corrected

_COLUMNS = ("old_logprobs", "rollout_logprobs")


def trained_tokens(batch: TrainingBatch) -> Tensor:
    """bool [R, L]: where there is loss."""
    return batch.tokens["loss_weights"] != 0


def log_ratios(batch: TrainingBatch, level: Literal["token", "sequence", "geometric"]) -> Tensor:
    """float64 [R, L]: the log ratio that each token with loss is judged by; 0 elsewhere."""
    missing = [name for name in _COLUMNS if name not in batch.tokens]
    if missing:
        raise DataError(
            f"The correction needs {listing(missing)}, which this run's batches do not have. Remove `correction`, or "
            "choose a `source` and a `rollout_engine` that provide them."
        )
    trained = trained_tokens(batch)
    old, rollout = (batch.tokens[name].detach().double() for name in _COLUMNS)
    ratios = torch.where(trained, old - rollout, 0.0)
    if level == "token":
        return ratios
    numbers = segment_numbers(batch)
    sums = sums_by_number(ratios, numbers)
    if level == "geometric":
        sums = sums / sums_by_number(trained, numbers).clamp(min=1)
    return torch.where(trained, sums[numbers], 0.0)


def bounded_weights(log_ratio: Tensor) -> Tensor:
    """exp, without overflow or a rounding to 0."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def is_within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """bool [R, L]: low <= ratio <= high."""
    bounds = torch.tensor([low, high], dtype=torch.float64).log()
    return (log_ratio >= bounds[0]) & (log_ratio <= bounds[1])


def corrected(batch: TrainingBatch, factors: Tensor, **shares: Tensor) -> Corrected:
    """The factors, and as metrics their mean and `shares` (bool [R, L]), both of the tokens with loss."""
    trained = trained_tokens(batch)
    count = max(int(trained.sum()), 1)
    metrics = {f"correction/{name}": float((where & trained).sum()) / count for name, where in shares.items()}
    metrics["correction/factor"] = float(factors[trained].sum()) / count
    return Corrected(factors.float(), metrics)
