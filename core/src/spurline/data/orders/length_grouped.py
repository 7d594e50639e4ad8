"""Order `length_grouped`: samples of similar length share a batch, so that padding costs little."""

from __future__ import annotations

import numpy as np

from spurline.data.orders.configs import LengthGroupedOrderConfig
from spurline.data.orders.epochs import EpochOrder, Indices, permutation
from spurline.protocols.order import SampleFacts

_BATCHES = 2**32
"""Stream of the permutations of batches, beyond those of datasets."""


class LengthGroupedOrder(EpochOrder):
    """Shuffles an epoch, sorts pools of it by length, cuts them into batches and shuffles these."""

    def __init__(self, config: LengthGroupedOrderConfig, *, samples: SampleFacts, seed: int) -> None:
        super().__init__(config, samples=samples, seed=seed)
        self._lengths = samples.lengths()
        self._pool = config.pool_batches * samples.per_step

    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        shuffled = mixture[permutation(len(mixture), self.seed, epoch)]
        # Batches do not end where epochs do: the first samples belong to the batch that the last epoch began.
        size = self.samples.per_step
        first = min(-epoch * len(mixture) % size, len(mixture))
        last = first + (len(mixture) - first) // size * size
        batches = self._by_length(shuffled[first:last]).reshape(-1, size)
        batches = batches[permutation(len(batches), self.seed, epoch, stream=_BATCHES)]
        return np.concatenate([shuffled[:first], batches.ravel(), shuffled[last:]])

    def _by_length(self, samples: Indices) -> Indices:
        pools = np.arange(len(samples)) // self._pool
        return samples[np.lexsort((self._lengths[samples], pools))]
