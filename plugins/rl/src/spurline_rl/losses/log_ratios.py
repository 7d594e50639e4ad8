"""Compute the log ratios between trainer and engine for the tokens of a batch.

    rho_t = old_logprobs_t - rollout_logprobs_t

Only tokens with loss are kept. They are read row after row into a flat array.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.errors import DataError, listing

COLUMNS = ("old_logprobs", "rollout_logprobs")
"""The trainer's logprobs before the update, and the engine's logprobs."""


class LogRatios:
    """The log ratios of a batch's tokens with loss. `values` is float64 [N], in nats.

    Raises:
        DataError: If the batch lacks the logprobs of the trainer or the engine.
    """

    def __init__(self, batch: TrainingBatch) -> None:
        if missing := [name for name in COLUMNS if name not in batch.tokens]:
            raise DataError(
                f"The correction needs {listing(missing)}, which this run's batches do not have. Remove `correction`, "
                "or choose a `source` and a `rollout_engine` that provide them."
            )
        self._columns = batch.tokens
        self.where: NDArray[np.bool_] = batch.tokens["loss_weights"].numpy() != 0
        """True for the tokens with loss, bool [R, L]."""
        old, rollout = (self._flat(name) for name in COLUMNS)
        # If both logprobs are -inf, the ratio is NaN, and so are metrics and factors.
        with np.errstate(invalid="ignore"):
            self.values = torch.from_numpy(np.subtract(old, rollout, dtype=np.float64))

    def column(self, name: str) -> Tensor:
        """Return another column of the batch at the tokens with loss, such as `advantages`: [N]."""
        return torch.from_numpy(self._flat(name))

    @cached_property
    def lengths(self) -> Tensor:
        """Return the number of tokens with loss in each sequence that has such tokens: int64 [S]. The sum is N."""
        ids = self._flat("segment_ids")
        begins = np.ones(len(ids), dtype=np.bool_)
        np.not_equal(ids[1:], ids[:-1], out=begins[1:])
        row_begins = np.cumsum(np.count_nonzero(self.where, axis=1))[:-1]
        begins[row_begins[row_begins < len(ids)]] = True
        return torch.from_numpy(np.diff(np.flatnonzero(begins), append=len(ids)))

    def sums(self) -> Tensor:
        """Return the sum of log ratios of each sequence, which is the log of the product of its ratios: float64 [S]."""
        numbers = self.spread(torch.arange(len(self.lengths)))
        return torch.zeros(len(self.lengths), dtype=torch.float64).index_add_(0, numbers, self.values)

    def means(self) -> Tensor:
        """Return the mean log ratio of each sequence, which is the log of its ratios' geometric mean: float64 [S]."""
        return self.sums() / self.lengths

    def spread(self, of_sequences: Tensor) -> Tensor:
        """Repeat the value of each sequence, [S], for each of its tokens with loss: [N]."""
        return torch.from_numpy(np.repeat(of_sequences.numpy(), self.lengths.numpy()))

    def _flat(self, name: str) -> NDArray[Any]:
        return self._columns[name].detach().numpy()[self.where]
