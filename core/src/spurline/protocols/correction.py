"""Kind `correction`: weights that correct for the difference between rollout and trainer distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from spurline.data.batch import TrainingBatch


class Correction(Protocol):
    """Importance weights or masks from logprobs.

    Factory: `Class(config)`. Pure.
    """

    def weights(self, batch: TrainingBatch) -> Tensor:
        """float32 [R, L] factors for `loss_weights`, from `rollout_logprobs` and `old_logprobs`; no gradient."""
        ...
