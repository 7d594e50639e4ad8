"""The log ratios of a whole batch: what corrections and metrics of mismatch share.

Corrections see them in blocks of whole rows that fit a processor's cache, in which operations over all values are
several times faster than over a whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.errors import DataError, listing
from spurline_rl.losses.log_ratios import LogRatios
from spurline_rl.protocols.correction import Correction

COLUMNS = ("old_logprobs", "rollout_logprobs")
"""The parts of log ratios: the trainer's logprobs before the update, and the engine's."""

BLOCK_TOKENS = 1 << 16
"""Tokens of a block, whose float64 values are half a MiB."""


class Scratch:
    """Memory for values of all tokens of a batch that the next batch needs again: to touch fresh memory takes longer
    than to compute what is written there."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.float64]] = {}

    def floats(self, name: str, count: int) -> NDArray[np.float64]:
        """float64 [count] of any values; the array that this name gave before is overwritten by this one."""
        array = self._arrays.get(name)
        if array is None or len(array) < count:
            array = self._arrays[name] = np.empty(count, np.float64)
        return array[:count]


class BatchLogRatios:
    """The log ratios of a whole batch, computed once.

    values: float64 [N], those of all tokens with loss, row after row; valid until the scratch serves another batch.

    Raises:
        DataError: If the batch lacks a column that they are made of.
    """

    @staticmethod
    def can_be_made_of(batch: TrainingBatch) -> bool:
        """Return whether the batch has the columns."""
        return all(name in batch.tokens for name in COLUMNS)

    def __init__(self, batch: TrainingBatch, scratch: Scratch | None = None) -> None:
        missing = [name for name in COLUMNS if name not in batch.tokens]
        if missing:
            raise DataError(
                f"The correction needs {listing(missing)}, which this run's batches do not have. Remove `correction`, "
                "or choose a `source` and a `rollout_engine` that provide them."
            )
        self._columns = batch.tokens
        self._where = _array(batch.tokens["loss_weights"]) != 0
        counts = np.count_nonzero(self._where, axis=1)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._scratch = scratch or Scratch()
        self.values = self._scratch.floats("log ratios", int(self._starts[-1]))
        old, rollout = (_array(batch.tokens[name]) for name in COLUMNS)
        with np.errstate(invalid="ignore"):  # two logprobs of -inf have no ratio, which metrics and factors show as NaN
            for rows, tokens in self._blocks():
                where = self._where[rows]
                np.subtract(old[rows][where], rollout[rows][where], out=self.values[tokens], dtype=np.float64)

    def correct(self, correction: Correction) -> tuple[Tensor, dict[str, float]]:
        """The factors, float32 [R, L] and 1 on tokens without loss; means over the tokens with loss of the factors, as
        `correction/factor`, and of the metrics that the correction gives."""
        column = np.ones(self._where.shape, np.float32)
        factors = self._scratch.floats("factors", len(self.values))
        sums: dict[str, float] = {}
        for rows, tokens in self._blocks():
            where = self._where[rows]
            ratios = LogRatios(torch.from_numpy(self.values[tokens]), rows, where, self._columns)
            corrected = correction.correct(ratios)
            factors[tokens] = corrected.factors.numpy()
            column[rows][where] = factors[tokens]
            for name, values in corrected.metrics.items():
                sums[name] = sums.get(name, 0.0) + float(values.sum())
        count = max(len(factors), 1)
        metrics = {name: total / count for name, total in sums.items()}
        metrics["correction/factor"] = float(torch.from_numpy(factors).sum()) / count
        return torch.from_numpy(column), metrics

    def _blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows of each block and where their values lie; one block without rows for a batch without."""
        num_rows, length = self._where.shape
        size = max(1, BLOCK_TOKENS // max(length, 1))
        for start in range(0, max(num_rows, 1), size):
            rows = slice(start, min(start + size, num_rows))
            yield rows, slice(int(self._starts[rows.start]), int(self._starts[rows.stop]))


def correct_batch(batch: TrainingBatch, correction: Correction) -> tuple[Tensor, dict[str, float]]:
    """Factors of all tokens, float32 [R, L], and metrics; see `BatchLogRatios.correct`."""
    return BatchLogRatios(batch).correct(correction)


def _array(column: Tensor) -> NDArray[Any]:
    return column.detach().numpy()
