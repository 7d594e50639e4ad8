"""Order samples by difficulty: the easy ones first, later all of them shuffled.

Imports numpy, so it is kept apart from `config.py` and imported when a run builds it.
"""

from __future__ import annotations

import numpy as np

from spurline.data.orders.epochs import EpochOrder, Indices, permutation
from spurline.protocols.order import SampleFacts
from spurline_plugin_template.config import ByDifficultyConfig


class ByDifficulty(EpochOrder):
    """Arranges the samples of an epoch, which the base class chooses."""

    def __init__(self, config: ByDifficultyConfig, *, samples: SampleFacts, seed: int) -> None:
        super().__init__(config, samples=samples, seed=seed)
        # A row without a number is an error here, before training, and in `spurline plan`.
        self._difficulty = samples.columns.numbers(config.column)
        self._sorted_epochs = config.sorted_epochs

    def arrange(self, mixture: Indices, epoch: int) -> Indices:
        shuffled = mixture[permutation(len(mixture), self.seed, epoch)]
        if epoch >= self._sorted_epochs:
            return shuffled
        return shuffled[np.argsort(self._difficulty[shuffled], kind="stable")]
