"""Order the samples of each epoch, as pure functions of the seed.

Data flow: facts about the samples -> order -> indices of a step -> TokenView. An order is an endless sequence of
epochs. No random generator keeps a state, so any step can be asked for at any time, on any thread, before or after a
resume.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from spurline.data.configs import CurriculumOrderConfig, LengthGroupedOrderConfig
from spurline.protocols.order import OrderConfig, SampleFacts

Indices = NDArray[np.int64]

_OF_BATCHES = _WITHIN_STAGES = 2**32
"""The random stream that shuffles an epoch's batches, or the samples within the stages of a curriculum. Stream 0
shuffles whole epochs, and stream d + 1 shuffles the passes over dataset d."""


def random_words(count: int, seed: int, number: int, stream: int = 0) -> NDArray[np.uint64]:
    """Return random bits that depend on (seed, number, stream) only; uint64 [count].

    They come from the raw stream of a counter-based generator (Philox4x64, Salmon et al. 2011), which no upgrade of
    numpy changes. The algorithms of numpy's `Generator` may change.
    """
    generator = np.random.Philox(
        key=np.array([seed, stream], dtype=np.uint64), counter=np.array([0, 0, number, 0], np.uint64)
    )
    return generator.random_raw(count)


def permutation(count: int, seed: int, epoch: int, stream: int = 0) -> Indices:
    """Return a permutation of range(count) that depends on (seed, epoch, stream) only; int64 [count]."""
    return np.argsort(random_words(count, seed, epoch, stream), kind="stable").astype(np.int64)


class EpochOrder(ABC):
    """Base of static orders: a subclass arranges the samples of one epoch.

    An epoch contains `samples.shares[i]` samples of dataset i. It continues in each dataset where the previous epoch
    stopped, so over several epochs every sample is seen equally often.
    """

    shuffles_passes: ClassVar[bool] = True
    """If True, each pass over a dataset is shuffled, unless every epoch contains exactly one pass over it. If False,
    its samples are in file order."""

    def __init__(self, config: OrderConfig, *, samples: SampleFacts, seed: int) -> None:
        assert len(samples.sizes) == len(samples.weights), (samples.sizes, samples.weights)
        assert samples.samples_per_epoch > 0, "an order needs at least one sample"
        self.samples = samples
        self.seed = seed
        self._starts = tuple(np.cumsum([0, *samples.sizes])[:-1].tolist())
        self._shares, self._per_epoch = samples.shares, samples.samples_per_epoch
        # A batch may need two epochs, and a prefetch one more.
        self._epoch = functools.lru_cache(maxsize=3)(self._build_epoch)

    @abstractmethod
    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        """Return an epoch's samples in training order, as a pure function. Epochs and samples are counted from 0.

        `mixture` has the same samples in file order, int64 [samples_per_epoch], with repeats if weights are above 1.
        """

    def positions(self, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop) of the endless order, which wraps into following epochs."""
        parts: list[Indices] = []
        while start < stop:
            epoch, offset = divmod(start, self._per_epoch)
            take = min(stop - start, self._per_epoch - offset)
            parts.append(self._epoch(epoch)[offset : offset + take])
            start += take
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _build_epoch(self, epoch: int) -> Indices:
        parts = [self._dataset_part(dataset, epoch) for dataset in range(len(self._shares))]
        arranged = self.arrange(np.concatenate(parts), epoch)
        arranged.setflags(write=False)
        return arranged

    def _dataset_part(self, dataset: int, epoch: int) -> Indices:
        """Return the epoch's share of one dataset, from an endless sequence of passes over the dataset."""
        size, share = self.samples.sizes[dataset], self._shares[dataset]
        if size == 0:
            return np.zeros(0, np.int64)
        position, stop = epoch * share, (epoch + 1) * share
        parts: list[Indices] = []
        while position < stop:
            one_pass, offset = divmod(position, size)
            take = min(stop - position, size - offset)
            order = np.arange(size, dtype=np.int64)
            if self.shuffles_passes and share != size:
                order = permutation(size, self.seed, one_pass, stream=dataset + 1)
            parts.append(order[offset : offset + take])
            position += take
        return np.concatenate(parts) + self._starts[dataset]


class UniformOrder(EpochOrder):
    """Draws a permutation for each epoch."""

    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        return mixture[permutation(len(mixture), self.seed, epoch)]


class SequentialOrder(EpochOrder):
    """File order, dataset after dataset."""

    shuffles_passes = False

    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        return mixture


class LengthGroupedOrder(EpochOrder):
    """Shuffles an epoch, sorts pools of its samples by length, cuts them into batches and shuffles the batches."""

    def __init__(self, config: LengthGroupedOrderConfig, *, samples: SampleFacts, seed: int) -> None:
        super().__init__(config, samples=samples, seed=seed)
        self._lengths = samples.lengths()
        self._pool = config.pool_batches * samples.per_step

    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        shuffled = mixture[permutation(len(mixture), self.seed, epoch)]
        # The first samples may belong to a batch that began in the epoch before.
        size = self.samples.per_step
        first = min(-epoch * len(mixture) % size, len(mixture))
        last = first + (len(mixture) - first) // size * size
        whole = shuffled[first:last]
        pools = np.arange(len(whole)) // self._pool
        batches = whole[np.lexsort((self._lengths[whole], pools))].reshape(-1, size)
        batches = batches[permutation(len(batches), self.seed, epoch, stream=_OF_BATCHES)]
        return np.concatenate([shuffled[:first], batches.ravel(), shuffled[last:]])


class CurriculumOrder(EpochOrder):
    """Sorts each epoch by difficulty. Rows that will be skipped have no difficulty, and come last."""

    def __init__(self, config: CurriculumOrderConfig, *, samples: SampleFacts, seed: int) -> None:
        super().__init__(config, samples=samples, seed=seed)
        difficulty = samples.columns.numbers(config.column)
        self._rank = difficulty if config.direction == "ascending" else -difficulty
        self._stages = config.stages

    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        shuffled = mixture[permutation(len(mixture), self.seed, epoch)]
        ranked = shuffled[np.argsort(self._rank[shuffled], kind="stable")]
        if self._stages is None:
            return ranked
        stage = np.arange(len(ranked)) * self._stages // len(ranked)
        within = permutation(len(ranked), self.seed, epoch, stream=_WITHIN_STAGES)
        return ranked[np.lexsort((within, stage))]
