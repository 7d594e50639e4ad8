"""Carry values between turns and the columns of the batch that holds them.

What a backend computes for `[rows, length]` positions is cut into one array per turn; what is computed per turn (such
as advantages) is written where the turn's response lies. A turn's prompt is the whole context it saw, so its response
begins that many tokens after the row's first one, be the row the turn's own or shared by all turns of an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, TrainingBatch
from spurline.rl.trajectory import Turn


class TurnColumns:
    """Where the responses of turns lie in a batch without padding rows, one segment per row.

    rows: for each turn the row that holds it.
    """

    def __init__(self, batch: TrainingBatch, turns: Sequence[Turn], rows: Sequence[int]) -> None:
        assert not bool(batch.is_padding_row.any()), "padding rows hold no turn"
        self._shape = (batch.num_rows, batch.length)
        # argmax finds the first of equal values: the first token of the row's segment.
        first = np.argmax(batch.tokens["segment_ids"].numpy() > 0, axis=1)
        self._places: list[tuple[int, slice]] = []
        for turn, row in zip(turns, rows, strict=True):
            start = int(first[row]) + len(turn.prompt_ids)
            self._places.append((row, slice(start, start + len(turn.response_ids))))

    def split(self, column: Tensor) -> list[NDArray[np.float32]]:
        """Values `[rows, length]` as one float32 array per turn, those of its response tokens."""
        values = column.numpy()
        return [values[place] for place in self._places]

    def responses(self) -> Tensor:
        """float32 `[rows, length]`: 1 on every response token, 0 elsewhere."""
        column = torch.zeros(self._shape, dtype=torch.float32)
        for place in self._places:
            column.numpy()[place] = 1
        return column

    def join(self, name: str, values: Sequence[NDArray[np.float32]]) -> Tensor:
        """One array per turn as the column `name`, zero everywhere else."""
        column = torch.zeros(self._shape, dtype=OPTIONAL_TOKEN_COLUMNS[name])
        target = column.numpy()
        for place, found in zip(self._places, values, strict=True):
            target[place] = found
        return column
