"""PPO: proximal policy optimisation with a clipped ratio (Schulman et al. 2017, arXiv:1707.06347).

With r = p / p_old per token:

    l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

A larger `clip_high`, 0.28, is the clip-higher of DAPO (Yu et al. 2025, arXiv:2503.14476). With `dual_clip` = c, tokens
with A < 0 lose at most -c A, however large r is (Ye et al. 2020, arXiv:1912.09729). `old_logprobs` are the trainer's
before the update. If the engine differs from the trainer, a `correction` makes this decoupled PPO (Hilton et al. 2021,
arXiv:2110.00641), with the old policy as the proximal one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_rl.losses.configs import PpoConfig
from spurline_rl.losses.policy_loss import PolicyLoss, clip_fractions, ratio_to_old


class Ppo(PolicyLoss[PpoConfig]):
    """The smaller objective of the ratio and the clipped ratio."""

    def __init__(self, config: PpoConfig):
        super().__init__(config)
        self._low, self._high = 1 - config.clip_low, 1 + config.clip_high

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        ratio, advantages = ratio_to_old(inputs), inputs.columns["advantages"]
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(self._low, self._high))
        if self.config.dual_clip is None:
            return loss
        return torch.where(advantages < 0, torch.minimum(loss, -advantages * self.config.dual_clip), loss)

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        ratio, advantages = ratio_to_old(inputs), inputs.columns["advantages"]
        found = clip_fractions(ratio, advantages, self._low, self._high)
        if self.config.dual_clip is not None:
            bounded = (ratio > self.config.dual_clip) & (advantages < 0)
            found["policy/clip_fraction_dual"] = bounded.to(ratio.dtype)
        return found

    def describe_surrogate(self) -> str:
        dual = f", and at most {self.config.dual_clip:g} where it is negative" if self.config.dual_clip else ""
        return (
            "PPO: minus advantage times probability ratio to the policy before the update, clipped to "
            f"{self._low:g}..{self._high:g} per token{dual}"
        )
