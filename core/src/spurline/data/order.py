"""In which order samples are trained on: a pure function of the seed, forever.

Place on the way: TokenStore sizes -> DataOrder -> indices of a step -> TokenView. The order is one endless
concatenation of epochs; each epoch is its own permutation of the weighted mixture. Nothing is drawn from a stateful
generator, so any step can be asked for at any time, on any thread, before or after a resume.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def permutation(count: int, seed: int, epoch: int, stream: int = 0) -> Indices:
    """A permutation of range(count) that depends on (seed, epoch, stream) only; int64 [count].

    Sorts counter-based random keys (Philox4x64, Salmon et al. 2011). Unlike `Generator.permutation`, whose algorithm
    numpy may change, the raw Philox stream is fixed, so the order survives library upgrades.
    """
    generator = np.random.Philox(
        key=np.array([seed, stream], dtype=np.uint64), counter=np.array([0, 0, epoch, 0], np.uint64)
    )
    return np.argsort(generator.random_raw(count), kind="stable").astype(np.int64)


class DataOrder:
    """The endless order over a mixture of datasets that lie one after another in a store.

    sizes: samples per dataset. weights: passes over each dataset per epoch; the part of a pass that an epoch leaves
    over is where the next epoch goes on, so over several epochs every sample is seen equally often.
    shuffle: False keeps store order, epoch after epoch.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool = True) -> None:
        assert len(sizes) == len(weights), (len(sizes), len(weights))
        self._sizes = tuple(sizes)
        self._starts = tuple(np.cumsum([0, *sizes])[:-1].tolist())
        self._weights = tuple(weights)
        self._seed = seed
        self._shuffle = shuffle
        self._per_epoch = tuple(max(1, round(n * w)) if n else 0 for n, w in zip(sizes, weights, strict=True))
        assert self.samples_per_epoch > 0, "an order needs at least one sample"
        # Two epochs meet in the batch that wraps around; evaluation and prefetch may look one further ahead.
        self._epoch = functools.lru_cache(maxsize=3)(self._build_epoch)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each dataset in one epoch: size x weight, rounded, at least one."""
        return self._per_epoch

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one pass over the weighted mixture."""
        return sum(self._per_epoch)

    def batch(self, step: int, batch_size: int) -> Indices:
        """Store indices of the 1-based step: positions [(step - 1) * batch_size, step * batch_size) of the order."""
        return self.positions((step - 1) * batch_size, step * batch_size)

    def positions(self, start: int, stop: int) -> Indices:
        """Store indices at positions [start, stop) of the endless order; wraps into following epochs."""
        per_epoch = self.samples_per_epoch
        parts: list[Indices] = []
        while start < stop:
            epoch, offset = divmod(start, per_epoch)
            take = min(stop - start, per_epoch - offset)
            parts.append(self._epoch(epoch)[offset : offset + take])
            start += take
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _build_epoch(self, epoch: int) -> Indices:
        parts = [self._dataset_part(dataset, epoch) for dataset in range(len(self._sizes))]
        mixture = np.concatenate(parts)
        if self._shuffle:
            mixture = mixture[permutation(len(mixture), self._seed, epoch)]
        mixture.setflags(write=False)
        return mixture

    def _dataset_part(self, dataset: int, epoch: int) -> Indices:
        """This epoch's share of one dataset, from the dataset's own endless sequence of passes."""
        size, share = self._sizes[dataset], self._per_epoch[dataset]
        if size == 0:
            return np.zeros(0, np.int64)
        position, stop = epoch * share, (epoch + 1) * share
        parts: list[Indices] = []
        while position < stop:
            one_pass, offset = divmod(position, size)
            take = min(stop - position, size - offset)
            order = np.arange(size, dtype=np.int64)
            if self._shuffle and share != size:
                order = permutation(size, self._seed, one_pass, stream=dataset + 1)
            parts.append(order[offset : offset + take])
            position += take
        return np.concatenate(parts) + self._starts[dataset]
