"""MIS: masked importance sampling (IcePop, Ling Team 2025, arXiv:2510.18855; per sequence: Liu, Li et al. 2025, "When
Speed Kills Stability").

    factor = p_old / p_rollout where that is in [low, high], else 0

per token, or per sequence with the product of the ratios of its tokens. What `tis` truncates is left out here: such a
token is more likely a numerical accident than a sample worth its cap.
"""

from __future__ import annotations

import torch

from spurline.builtin.rl_configs import MaskedImportanceSamplingConfig
from spurline.data.batch import TrainingBatch
from spurline.losses.corrections.log_ratio import bounded_weights, corrected, is_within, log_ratios
from spurline.protocols.correction import Corrected


class MaskedImportanceSampling:
    """The ratio inside a band, 0 outside."""

    def __init__(self, config: MaskedImportanceSamplingConfig):
        self.config = config

    def correct(self, batch: TrainingBatch) -> Corrected:
        ratios = log_ratios(batch, self.config.level)
        accepted = is_within(ratios, self.config.low, self.config.high)
        return corrected(batch, torch.where(accepted, bounded_weights(ratios), 0.0), rejected=~accepted)

    def describe(self) -> str:
        band = f"{self.config.low:g}..{self.config.high:g}"
        return f"MIS: weigh each {self.config.level} by its probability ratio of trainer to engine, 0 outside {band}."
