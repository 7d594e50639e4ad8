"""Give each sequence of a batch a row of its own, so that no result depends on how sequences were packed into rows.

A model may round differently for streams of different lengths. The backend makes a micro-batch of each unit: one
sequence, or the two answers of a pair that a loss compares. The shape of such a micro-batch depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from spurline.data.batch import Ragged, TrainingBatch
from spurline_models.backend_config import ModelBackendConfig

_PAIRS = "pair_ids"
"""The only column with which a loss may compare sequences (see `Loss`)."""


@dataclass(frozen=True)
class SeparatedBatch:
    """A batch with one sequence in each row. Rows with equal `unit_ids` are one unit, in an order of their own.

    Attributes:
        batch: The separated rows, without padding rows.
        places: int64 [rows, length], the index of each token in the flattened original batch, or -1 for padding.
    """

    batch: TrainingBatch
    places: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, needs: Collection[str] = ()) -> SeparatedBatch:
        """Separate a batch for a loss with these `needs`. Columns may be missing."""
        tokens = torch.nonzero(batch.tokens["segment_ids"].flatten()).flatten()
        lengths = torch.from_numpy(batch.segments["length"].values.astype(np.int64))
        begins, count = lengths.cumsum(0) - lengths, len(lengths)
        units = order = torch.arange(count)
        if _PAIRS in needs and _PAIRS in batch.tokens:
            pairs = batch.tokens[_PAIRS].flatten()[tokens[begins]].long()
            units = torch.where(pairs == 0, units + batch.tokens[_PAIRS].numel(), pairs.abs())
            # The chosen answer comes first, also if a packed row has the rejected one first.
            order = torch.argsort(2 * units + (pairs < 0))
        begins, lengths = begins[order].unsqueeze(1), lengths[order].unsqueeze(1)
        offsets = torch.arange(int(lengths.max()) if count else 0)
        is_token = offsets < lengths
        places = torch.full(is_token.shape, -1)
        places[is_token] = tokens[(begins + offsets)[is_token]]

        def column(values: Tensor) -> Tensor:
            separated = values.new_zeros((*places.shape, *values.shape[2:]))
            separated[is_token] = values.flatten(0, 1)[places[is_token]]
            return separated

        separated = replace(
            batch,
            tokens={**{name: column(values) for name, values in batch.tokens.items()}, "segment_ids": is_token.int()},
            segments={
                name: Ragged(values.values[order.numpy()], np.arange(count + 1))
                for name, values in batch.segments.items()
            },
            unit_ids=units[order],
            is_padding_row=torch.zeros(count, dtype=torch.bool),
            on_release=None,
        )
        return cls(separated, places)

    def restored(self, values: Tensor, original: TrainingBatch) -> Tensor:
        """Return values [rows, length] of the separated batch in the rows of the original, without padding rows."""
        result = values.new_zeros(original.num_rows * original.length)
        is_token = self.places >= 0
        result[self.places[is_token]] = values[is_token]
        return original.drop_padding_rows(result.view(original.num_rows, original.length))


def computed_rows(batch: TrainingBatch, needs: Collection[str], config: ModelBackendConfig) -> TrainingBatch:
    """Return the batch in the rows that a backend with these settings computes for a loss with these `needs`."""
    return SeparatedBatch.of(batch, needs).batch if config.is_reproducible else batch
