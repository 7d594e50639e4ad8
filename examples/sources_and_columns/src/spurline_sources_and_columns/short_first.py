"""Source `short_first`: another source whose answers carry loss on their first tokens only, for the first steps.

It decorates `sft` as well as `rollouts`, since both supply a `TrainingBatch`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from spurline.data.batch import TrainingBatch
from spurline.protocols.source import DecoratedSource, SourceContext
from spurline_sources_and_columns.config import ShortFirstConfig


class ShortFirst(DecoratedSource):
    """Overrides `build`; the inner source answers all else."""

    def __init__(self, config: ShortFirstConfig, context: SourceContext) -> None:
        super().__init__(config, context)
        self._config = config

    def build(self, step: int) -> TrainingBatch:
        batch = self.inner.build(step)
        return batch if step > self._config.until_step else keep_first(batch, self._config.first_tokens)


def keep_first(batch: TrainingBatch, count: int) -> TrainingBatch:
    """The batch with loss on no more than the first `count` tokens with loss of each segment."""
    weights, positions = batch.tokens["loss_weights"], batch.tokens["position_ids"]
    has_loss = weights > 0
    so_far = has_loss.long().cumsum(dim=1)
    # A segment begins where its position is 0, and its first token never carries loss.
    begin = (torch.arange(batch.length) - positions).clamp(min=0)
    rank = so_far - so_far.gather(1, begin)
    kept = torch.where(has_loss & (rank > count), torch.zeros_like(weights), weights)
    # A batch is read-only, and `replace` keeps `on_release`, which gives reused buffers back to the collator.
    return replace(batch, tokens={**batch.tokens, "loss_weights": kept})
