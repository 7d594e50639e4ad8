"""CISPO: clipped importance-sampling policy optimisation (MiniMax-M1, MiniMax 2025, arXiv:2506.13585).

With r = p / p_old per token, and sg stopping the gradient:

    l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p

The weight is clipped, not the token, so tokens whose ratio moved far keep a gradient. The paper sets no lower bound and
does not state its upper one. ScaleRL found several caps to work alike, among them the default of 5 (Khatri et al. 2025,
arXiv:2510.13786).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_rl.losses.configs import CispoConfig
from spurline_rl.losses.policy_loss import PolicyLoss, ratio_to_old


class Cispo(PolicyLoss[CispoConfig]):
    """Policy gradient with a clipped, constant importance weight."""

    def __init__(self, config: CispoConfig):
        super().__init__(config)
        self._low = 1 - config.clip_low if config.clip_low is not None else 0.0
        self._high = 1 + config.clip_high

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        weight = ratio_to_old(inputs).detach().clamp(self._low, self._high)
        return -weight * inputs.columns["advantages"] * inputs.logprobs

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        ratio = ratio_to_old(inputs)
        return {
            "policy/clip_fraction_low": (ratio < self._low).to(ratio.dtype),
            "policy/clip_fraction_high": (ratio > self._high).to(ratio.dtype),
        }

    def describe_surrogate(self) -> str:
        return (
            "CISPO: minus advantage times log-probability, weighted by the probability ratio to the policy before the "
            f"update, clipped to {self._low:g}..{self._high:g} and held constant"
        )
