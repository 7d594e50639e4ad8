"""Define the source `short_first`, which limits the tokens with loss of another source in the first steps.

It can decorate `sft` and `rollouts`, since both supply a `TrainingBatch`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from spurline.data.batch import TrainingBatch
from spurline.protocols.source import DecoratedSource, SourceContext
from spurline_sources_and_columns.config import ShortFirstConfig


class ShortFirst(DecoratedSource):
    """Overrides `build`. The inner source implements all other methods."""

    def __init__(self, config: ShortFirstConfig, context: SourceContext) -> None:
        super().__init__(config, context)
        self._config = config

    def build(self, step: int) -> TrainingBatch:
        batch = self.inner.build(step)
        return batch if step > self._config.until_step else keep_first(batch, self._config.first_tokens)


def keep_first(batch: TrainingBatch, count: int) -> TrainingBatch:
    """Return the batch with loss only on the first `count` of the tokens with loss in each segment."""
    weights, positions = batch.tokens["loss_weights"], batch.tokens["position_ids"]
    has_loss = weights > 0
    so_far = has_loss.long().cumsum(dim=1)
    # A segment begins at position 0, and its first token never has loss.
    begin = (torch.arange(batch.length) - positions).clamp(min=0)
    rank = so_far - so_far.gather(1, begin)
    kept = torch.where(has_loss & (rank > count), torch.zeros_like(weights), weights)
    # A batch is read-only, so make a new one. `replace` keeps `on_release`, which returns buffers to the collator.
    return replace(batch, tokens={**batch.tokens, "loss_weights": kept})
