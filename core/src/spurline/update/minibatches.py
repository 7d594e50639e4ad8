"""Mini-batches `whole`: one optimizer step per batch. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spurline.config.run_config import RunConfig
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.minibatches import MiniBatchesConfig

if TYPE_CHECKING:
    from spurline.data.batch import TrainingBatch


class WholeBatchConfig(MiniBatchesConfig):
    """One optimizer step per batch."""

    name: str = "whole"

    def minibatch_prompts(self, prompts_per_step: int) -> int:
        return prompts_per_step


class WholeBatch:
    """Makes one mini-batch of each batch, padded to the data-parallel size if the backend needs that."""

    def __init__(self, config: WholeBatchConfig, run: RunConfig, layout: ParallelLayout) -> None:
        self._row_multiple = layout.row_multiple

    def steps_per_batch(self) -> int:
        return 1

    def cut(self, batch: TrainingBatch) -> Sequence[TrainingBatch]:
        return [batch.pad_rows(self._row_multiple)]
