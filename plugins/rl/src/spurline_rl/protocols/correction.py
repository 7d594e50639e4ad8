"""Kind `correction`: factors that correct for the difference between the engine's and the trainer's distributions."""

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
        factors: Float [N] without gradient. They multiply the loss weights, and are exactly 0 for rejected tokens.
        metrics: Values [N] by name. Their means over the batch's tokens with loss are reported.
    """

    factors: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])


class Correction(Protocol):
    """Compute importance weights or masks from logprobs.

    Factory: `Class(config)`. Implementations are pure functions. A token's factor depends only on its own segment.

    `correct` is called for a few rows of a batch at a time, before any update. The factors become the column
    `correction_factors`, which is 1 on tokens without loss. `spurline.update.reduction.reduce_corrected` applies them.
    A mean over tokens does not count rejected tokens. The factors of the other tokens do not change its divisor.
    """

    def correct(self, ratios: LogRatios) -> Corrected:
        """Return factors from log ratios: the trainer's `old_logprobs` minus the engine's `rollout_logprobs`.

        `ratios` may have no tokens. A ratio is infinite or NaN if one of its logprobs is.
        """
        ...

    def describe(self) -> str:
        """Describe the correction in one sentence, for `spurline plan`."""
        ...
