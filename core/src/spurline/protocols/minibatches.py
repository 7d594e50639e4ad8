"""Kind `minibatches`: cut a batch into optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from spurline.data.batch import TrainingBatch


class MiniBatchesConfig(ComponentConfig):
    """Settings of the mini-batches."""

    kind: ClassVar[str] = "minibatches"

    def minibatch_prompts(self, prompts_per_step: int) -> int | None:
        """Return the number of prompts in each mini-batch of rollouts, or None if it is not fixed.

        An advantage with `advantage_scope: minibatch` normalises over this many consecutive prompts.
        """
        return None


class MiniBatches(Protocol):
    """Cut a batch into the mini-batches of its optimizer steps.

    Factory: `Class(config, run=RunConfig, layout=ParallelLayout)`. Rows with the same unit id stay together.
    """

    def steps_per_batch(self) -> int:
        """Return the number of optimizer steps per batch. LR schedules need the same number for each batch."""
        ...

    def cut(self, batch: TrainingBatch) -> Sequence[TrainingBatch]:
        """Return `steps_per_batch()` mini-batches in training order, each padded to the data-parallel size.

        If `layout.deals_rows` is true, the mini-batches are not padded, and may be views of the batch.
        """
        ...
