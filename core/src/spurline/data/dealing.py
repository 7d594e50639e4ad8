"""Deal the rows of a mini-batch to data-parallel ranks, and bring what they compute back to the rows.

Place on the way: mini-batch -> shards, one per rank, all with equally many rows -> values per rank -> values per row.
Any backend with several ranks uses this, so that padding is added and taken away in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import TrainingBatch


@dataclass(frozen=True)
class RankShards:
    """The rows of one mini-batch, dealt to ranks.

    parts: the batch of each rank, padded at its end so that all have equally many rows.
    rows: int64 array per rank, which rows of the mini-batch (padding rows not counted) its real rows are.
    """

    parts: tuple[TrainingBatch, ...]
    rows: tuple[NDArray[np.int64], ...]

    @classmethod
    def scatter(cls, batch: TrainingBatch, num_ranks: int) -> RankShards:
        """Deal consecutive rows to ranks as evenly as units allow; rows of one unit are neighbours and stay together.

        Padding rows of `batch` are dropped first. A rank may get padding rows alone, when there are fewer units.
        """
        real = batch.without_padding_rows()
        units = np.flatnonzero(np.diff(real.unit_ids.numpy(), prepend=-1)) if real.num_rows else np.zeros(0, np.int64)
        # The unit that a rank begins with is the first to start at or after its even share of the rows.
        shares = np.arange(1, num_ranks) * real.num_rows / num_ranks
        borders = [0, *np.append(units, real.num_rows)[np.searchsorted(units, shares)].tolist(), real.num_rows]
        rows = tuple(np.arange(start, stop, dtype=np.int64) for start, stop in pairwise(borders))
        height = max(1, *(len(part) for part in rows))
        return cls(tuple(real.take(part).pad_rows(height) for part in rows), rows)

    def gather(self, values: Sequence[Tensor]) -> Tensor:
        """Per-row values [rows of the rank, ...] of every rank, as values of the mini-batch's real rows, in order."""
        assert len(values) == len(self.parts), (len(values), len(self.parts))
        kept = [part.drop_padding_rows(value) for part, value in zip(self.parts, values, strict=True)]
        # Rows were dealt in order, so joining the ranks' rows in order is the inverse.
        return torch.cat(kept)
