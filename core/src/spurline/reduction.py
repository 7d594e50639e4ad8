"""How token losses become one number per optimizer step: the reduction sets the weights and the normaliser.

Place on the way: mini-batch -> reduction -> (weights w, normaliser Z) -> backend, which minimises sum(w * l) / Z. Both
are fixed here, for all rows of the optimizer step and before any cutting into micro-batches or ranks: means of parts
would overweight parts with short samples. Pure; knows no loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch

Reduction = Literal["token_mean", "sequence_mean"]


def token_mean(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
    """Every loss token counts the same: w as in the batch, Z the sum of w."""
    return batch, _normalizer(float(batch.tokens["loss_weights"].double().sum()))


def sequence_mean(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
    """Every segment with loss counts the same: w divided by its sum in the segment, Z the number of such segments."""
    weights = batch.tokens["loss_weights"]
    segments = _segment_numbers(batch)
    sums = torch.zeros(int(segments.max()) + 1 if segments.numel() else 1, dtype=torch.float64)
    sums.index_add_(0, segments.flatten(), weights.flatten().double())
    shares = torch.where(sums > 0, 1 / sums, 0.0)[segments]
    reduced = batch.with_tokens(loss_weights=(weights * shares).to(weights.dtype))
    return reduced, _normalizer(float((sums > 0).sum()))


REDUCTIONS: dict[Reduction, Callable[[TrainingBatch], tuple[TrainingBatch, float]]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
}


def _segment_numbers(batch: TrainingBatch) -> Tensor:
    """int64 [R, L]: a number for each segment of the batch, distinct between rows; padding is 0 of its row."""
    ids = batch.tokens["segment_ids"].long()
    per_row = int(ids.max()) + 1 if ids.numel() else 1
    return ids + per_row * torch.arange(batch.num_rows).unsqueeze(1)


def _normalizer(value: float) -> float:
    # A mini-batch without any loss token has gradient zero, whatever it is divided by.
    return value if value > 0 else 1.0
