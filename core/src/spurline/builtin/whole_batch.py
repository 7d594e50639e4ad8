"""Mini-batches `whole`: the batch of a step is one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

from spurline.builtin.configs import WholeBatchConfig
from spurline.config.run_config import RunConfig
from spurline.data.batch import TrainingBatch
from spurline.protocols.collator import ParallelLayout


class WholeBatch:
    """No cutting; only padding to the data-parallel size, where the collator has not done it."""

    def __init__(self, config: WholeBatchConfig, run: RunConfig, layout: ParallelLayout) -> None:
        self._layout = layout

    def steps_per_batch(self) -> int:
        return 1

    def cut(self, batch: TrainingBatch) -> Sequence[TrainingBatch]:
        return [batch.pad_rows(self._layout.data)]
