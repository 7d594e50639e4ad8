"""Order `curriculum`: from the easiest sample to the hardest, by a column of the rows."""

from __future__ import annotations

import numpy as np

from spurline.data.orders.configs import CurriculumOrderConfig
from spurline.data.orders.epochs import EpochOrder, Indices, permutation
from spurline.protocols.order import SampleFacts

_STAGES = 2**32
"""Stream of the permutation within stages, beyond those of datasets."""


class CurriculumOrder(EpochOrder):
    """Sorts each epoch by difficulty. Rows that will be skipped have none, and come last."""

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
        within = permutation(len(ranked), self.seed, epoch, stream=_STAGES)
        return ranked[np.lexsort((within, stage))]
