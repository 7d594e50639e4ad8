"""Kind `correction`: factors that correct for the difference between rollout and trainer distributions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from torch import Tensor

    from spurline.data.batch import TrainingBatch


class CorrectionConfig(ComponentConfig):
    """Settings of a correction."""

    kind: ClassVar[str] = "correction"


@dataclass(frozen=True)
class Corrected:
    """What a correction says about a batch.

    factors: float32 [R, L] for `loss_weights`, without gradient; exactly 0 where a token is rejected.
    metrics: numbers about this batch, shares of its loss tokens in 0..1 among them.
    """

    factors: Tensor
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Correction(Protocol):
    """Importance weights or masks from logprobs.

    Factory: `Class(config)`. Pure; a token's factor depends on its own segment only.
    Called by the source, once for a whole batch, when the models have scored the tokens: after `old_logprobs` are in
    the batch, before it is cut and before any update. The factors travel in the column `correction_factors`, and
    `spurline.update.reduction.reduce_corrected` applies them to each mini-batch of the policy: rejected tokens leave
    before the reduction counts them, all other factors weigh after it, so that they do not cancel out of the
    normaliser.
    """

    def correct(self, batch: TrainingBatch) -> Corrected:
        """Factors from `old_logprobs`, the trainer's before the update, and `rollout_logprobs`, the engine's.

        Raises DataError when a column is missing.
        """
        ...

    def describe(self) -> str:
        """The correction in words, one sentence, for `spurline plan`."""
        ...
