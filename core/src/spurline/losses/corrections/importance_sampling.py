"""TIS: truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training"; Ionides 2008).

    factor = min(p_old / p_rollout, cap)

per token, or per sequence with the product of the ratios of its tokens. Weighing the loss by p_old / p_rollout takes
the expectation under the policy that the loss assumes instead of the one that generated; the cap bounds the variance at
the price of a bias. With `loss: ppo` this is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641), exactly so with
`cap: null`: p_old is the proximal policy, p_rollout the behaviour policy.

MIS: masked importance sampling (IcePop, Ling Team 2025, arXiv:2510.18855; per sequence: Liu, Li et al. 2025, "When
Speed Kills Stability").

    factor = p_old / p_rollout where that is in [low, high], else 0

per token, or per sequence with the product of the ratios of its tokens. What `tis` truncates is left out here: such a
token is more likely a numerical accident than a sample worth its cap.
"""

from __future__ import annotations

import math

import torch

from spurline.data.batch import TrainingBatch
from spurline.losses.configs import MaskedImportanceSamplingConfig, TruncatedImportanceSamplingConfig
from spurline.losses.corrections.log_ratio import bounded_weights, corrected, is_within, log_ratios
from spurline.protocols.correction import Corrected


class TruncatedImportanceSampling:
    """min(ratio, cap)."""

    def __init__(self, config: TruncatedImportanceSamplingConfig):
        self.config = config

    def correct(self, batch: TrainingBatch) -> Corrected:
        ratios = log_ratios(batch, self.config.level)
        largest = math.log(self.config.cap) if self.config.cap is not None else math.inf
        return corrected(batch, bounded_weights(ratios.clamp(max=largest)), truncated=ratios > largest)

    def describe(self) -> str:
        cap = f", at most {self.config.cap:g}" if self.config.cap is not None else ""
        return f"TIS: weigh each {self.config.level} by its probability ratio of trainer to engine{cap}."


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
