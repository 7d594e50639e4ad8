"""Sums over the segments of a batch, for what counts by sequence and not by token.

A segment is one sequence also where several share a row, so whoever needs sequences asks here and never sums rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch


def segment_numbers(batch: TrainingBatch) -> Tensor:
    """int64 [R, L]: a number for each segment of the batch, distinct between rows; padding has one of its own per row.

    Segment s of row r, both as they are counted in the batch (s from 1), has number r * (S + 1) + s, with S the most
    segments of any row.
    """
    ids = batch.tokens["segment_ids"].long()
    return ids + numbers_per_row(batch) * torch.arange(batch.num_rows).unsqueeze(1)


def numbers_per_row(batch: TrainingBatch) -> int:
    """Segment numbers that each row takes up: one for padding, and one for each segment of the fullest row."""
    ids = batch.tokens["segment_ids"]
    return int(ids.max()) + 1 if ids.numel() else 1


def sums_by_number(values: Tensor, numbers: Tensor) -> Tensor:
    """float64 [numbers]: the sum of the values under each number; both arguments have one shape."""
    size = int(numbers.max()) + 1 if numbers.numel() else 1
    return torch.zeros(size, dtype=torch.float64).index_add_(0, numbers.flatten(), values.flatten().double())
