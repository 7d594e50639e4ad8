"""TIS: truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training"; Ionides 2008).

    factor = min(p_old / p_rollout, cap)

per token, or per sequence with the product of the ratios of its tokens. Weighing the loss by p_old / p_rollout takes
the expectation under the policy that the loss assumes instead of the one that generated; the cap bounds the variance at
the price of a bias. With `loss: ppo` this is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641), exactly so with
`cap: null`: p_old is the proximal policy, p_rollout the behaviour policy.
"""

from __future__ import annotations

import math

from spurline.builtin.rl_configs import TruncatedImportanceSamplingConfig
from spurline.data.batch import TrainingBatch
from spurline.losses.corrections.log_ratio import bounded_weights, corrected, log_ratios
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
