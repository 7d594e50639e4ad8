"""Kind `correction`: factors that correct for the difference between rollout and trainer distributions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from torch import Tensor

    from spurline_rl.losses.log_ratios import LogRatios


class CorrectionConfig(ComponentConfig):
    """Settings of a correction."""

    kind: ClassVar[str] = "correction"


@dataclass(frozen=True)
class Corrected:
    """The result of a correction for N tokens.

    Attributes:
        factors: Float [N] for `loss_weights`, without gradient; exactly 0 where a token is rejected.
        metrics: Named [N] values; their means over the tokens with loss of the batch are reported. Booleans give
            shares.
    """

    factors: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])


class Correction(Protocol):
    """Importance weights or masks from logprobs.

    Factory: `Class(config)`. Pure; a token's factor depends on its own segment only.
    Called by the source when the models have scored the tokens: after `old_logprobs` are in the batch, before it is cut
    and before any update; once per block of rows, with the log ratios of their tokens with loss. The factors travel in
    the column `correction_factors`, 1 on tokens without loss, and
    `spurline.update.reduction.reduce_corrected` applies them to each mini-batch of the policy: rejected tokens leave
    before the reduction counts them, all other factors weigh after it, so that they do not cancel out of the
    normaliser.
    """

    def correct(self, ratios: LogRatios) -> Corrected:
        """Factors from log ratios: `old_logprobs`, the trainer's before the update, less the engine's
        `rollout_logprobs`.

        There may be no tokens. Values may be infinite or NaN where a logprob is.
        """
        ...

    def describe(self) -> str:
        """The correction in words, one sentence, for `spurline plan`."""
        ...
