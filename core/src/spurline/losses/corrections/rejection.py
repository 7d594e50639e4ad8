"""Geometric rejection (Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch").

    factor = 1 where (p_old(y) / p_rollout(y))^(1 / |y|) is in [low, high], else 0      for the whole sequence y

The mean ratio per token judges long and short sequences by the same measure, so its band can be narrow. Weights stay 1:
it removes outliers and corrects nothing else.

Sequence rejection (Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch").

    factor = 1 where p_old(y) / p_rollout(y) is in [low, high], else 0      for the whole sequence y

The ratio is the product over all tokens, so long sequences leave the band more easily; `geometric_rejection` does not
depend on length. Weights stay 1: it removes outliers and corrects nothing else.
"""

from __future__ import annotations

from spurline.data.batch import TrainingBatch
from spurline.losses.configs import GeometricRejectionConfig, SequenceRejectionConfig
from spurline.losses.corrections.log_ratio import corrected, is_within, log_ratios
from spurline.protocols.correction import Corrected


class GeometricRejection:
    """Sequences with an unusual mean ratio get no loss."""

    def __init__(self, config: GeometricRejectionConfig):
        self.config = config

    def correct(self, batch: TrainingBatch) -> Corrected:
        accepted = is_within(log_ratios(batch, "geometric"), self.config.low, self.config.high)
        return corrected(batch, accepted.double(), rejected=~accepted)

    def describe(self) -> str:
        band = f"{self.config.low:g}..{self.config.high:g}"
        return f"Geometric rejection: leave out sequences whose mean ratio of trainer to engine is not in {band}."


class SequenceRejection:
    """Sequences with an unusual ratio get no loss."""

    def __init__(self, config: SequenceRejectionConfig):
        self.config = config

    def correct(self, batch: TrainingBatch) -> Corrected:
        accepted = is_within(log_ratios(batch, "sequence"), self.config.low, self.config.high)
        return corrected(batch, accepted.double(), rejected=~accepted)

    def describe(self) -> str:
        band = f"{self.config.low:g}..{self.config.high:g}"
        return f"Sequence rejection: leave out sequences whose ratio of trainer to engine is not in {band}."
