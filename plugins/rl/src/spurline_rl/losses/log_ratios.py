"""How far the trainer is from the engine about some tokens: what corrections see.

    rho_t = old_logprobs_t - rollout_logprobs_t

Only tokens with loss count, and only they are kept: flat, row after row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class LogRatios:
    """Log ratios of the tokens with loss of some rows; every sequence that has such tokens is there as a whole.

    Args:
        values: float64 [N], in nats, token after token.
        rows, where: Rows of the batch, and bool [r, L]: which of their tokens the values are of.
        columns: The token columns of the batch, each [R, L].
    """

    def __init__(self, values: Tensor, rows: slice, where: NDArray[np.bool_], columns: Mapping[str, Tensor]) -> None:
        self.values = values
        self._rows = rows
        self._where = where
        self._columns = columns

    def column(self, name: str) -> Tensor:
        """[N], another column of the batch at these tokens, `advantages` for one."""
        return torch.from_numpy(self._columns[name].detach().numpy()[self._rows][self._where])

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [S], how many of the tokens each sequence has, none of them 0; their sum is N."""
        ids = self.column("segment_ids").numpy()
        begins = np.ones(len(ids), dtype=np.bool_)
        np.not_equal(ids[1:], ids[:-1], out=begins[1:])
        row_begins = np.cumsum(np.count_nonzero(self._where, axis=1))[:-1]
        begins[row_begins[row_begins < len(ids)]] = True
        return torch.from_numpy(np.diff(np.flatnonzero(begins), append=len(ids)))

    def sums(self) -> Tensor:
        """float64 [S], the sum of each sequence: the log of the product of its ratios."""
        numbers = self.spread(torch.arange(len(self.lengths)))
        return torch.zeros(len(self.lengths), dtype=torch.float64).index_add_(0, numbers, self.values)

    def means(self) -> Tensor:
        """float64 [S], the mean of each sequence: the log of the geometric mean of its ratios."""
        return self.sums() / self.lengths

    def spread(self, of_sequences: Tensor) -> Tensor:
        """[N], the value of its sequence for each token, of [S] values."""
        return torch.from_numpy(np.repeat(of_sequences.numpy(), self.lengths.numpy()))
