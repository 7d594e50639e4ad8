"""Order samples by difficulty in the first epochs, easy samples first, and shuffle them in later epochs.

This module imports numpy, so it is separate from `config.py` and is imported when a run builds the order.
"""

from __future__ import annotations

import numpy as np

from spurline.data.orders.epochs import EpochOrder, Indices, permutation
from spurline.protocols.order import SampleFacts
from spurline_plugin_template.config import ByDifficultyConfig


class ByDifficulty(EpochOrder):
    """Arranges the samples of each epoch. The base class chooses these samples."""

    def __init__(self, config: ByDifficultyConfig, *, samples: SampleFacts, seed: int) -> None:
        super().__init__(config, samples=samples, seed=seed)
        # If a row has no number, this raises an error before training, and in `spurline plan`.
        self._difficulty = samples.columns.numbers(config.column)
        self._sorted_epochs = config.sorted_epochs

    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        shuffled = mixture[permutation(len(mixture), self.seed, epoch)]
        if epoch >= self._sorted_epochs:
            return shuffled
        return shuffled[np.argsort(self._difficulty[shuffled], kind="stable")]
