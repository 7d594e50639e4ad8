"""Sums over the two answers of each preference pair, for losses that compare them.

Place on the way: token values and the column `pair_ids` -> values per answer -> a loss per pair -> back to tokens.
Waits for no device: how many pairs there are follows from the number of segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs


class PairIndex:
    """Which segments are the chosen and the rejected answer of each pair of a micro-batch.

    A pair of which one answer is missing, which a source that keeps pairs in one unit never makes, gets values that
    are not numbers, so that the update is refused before it changes anything.
    """

    def __init__(self, inputs: TokenLossInputs) -> None:
        self._segment_index = inputs.segment_index
        self._num_segments = inputs.num_segments
        ids = self._index_of_pairs(inputs.columns["pair_ids"])
        # Pair after pair, the chosen answer first; segments without loss have id 0 and come last.
        last = torch.iinfo(torch.int64).max
        order = torch.argsort(torch.where(ids == 0, last, 2 * ids.abs() + (ids < 0)))
        self._num_pairs = (self._num_segments + 1) // 2
        padded = torch.cat([order, order[-1:]]) if self._num_segments % 2 else order
        self._chosen, self._rejected = padded.view(self._num_pairs, 2).unbind(1)
        self._whole = ids[self._chosen] + ids[self._rejected] == 0
        place = torch.empty_like(order).scatter(0, order, torch.arange(self._num_segments, device=order.device))
        self._pair_of_token = (place // 2)[self._segment_index]

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of token values [N] over the chosen and over the rejected answers, each [pairs]."""
        sums = values.new_zeros(self._num_segments).index_add(0, self._segment_index, values)
        return self._of_pairs(sums)

    def means(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Means of token values [N] over the chosen and over the rejected answers, each [pairs]."""
        sums = values.new_zeros(self._num_segments).index_add(0, self._segment_index, values)
        counts = values.new_zeros(self._num_segments).index_add(0, self._segment_index, torch.ones_like(values))
        return self._of_pairs(sums / counts.clamp(min=1))

    def to_tokens(self, values: Tensor) -> Tensor:
        """Values of pairs [pairs] at each token [N]."""
        return values[self._pair_of_token]

    def _index_of_pairs(self, pair_ids: Tensor) -> Tensor:
        """int64 [segments]: the signed pair of each segment; its tokens all have the same one."""
        ids = torch.zeros(self._num_segments, dtype=torch.int64, device=pair_ids.device)
        return ids.scatter(0, self._segment_index, pair_ids.long())

    def _of_pairs(self, segments: Tensor) -> tuple[Tensor, Tensor]:
        missing = torch.full((), float("nan"), dtype=segments.dtype, device=segments.device)
        chosen, rejected = segments[self._chosen], segments[self._rejected]
        return torch.where(self._whole, chosen, missing), torch.where(self._whole, rejected, missing)
