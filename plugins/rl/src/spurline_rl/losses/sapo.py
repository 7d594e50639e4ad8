"""SAPO: soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347).

With r = p / p_old per token, and sigma the logistic function:

    l = -A * 4 / tau * sigma(tau (r - 1)),      tau = tau_positive where A > 0, else tau_negative

Its gradient is the gradient of -A r, multiplied by a gate 4 sigma (1 - sigma). The gate is 1 at r = 1 and closes
smoothly on both sides. For A <= 0, a higher tau closes it earlier: lowering the probability of one token raises that of
all others, which makes training unstable.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_rl.losses.configs import SapoConfig
from spurline_rl.losses.policy_loss import PolicyLoss, ratio_to_old


class Sapo(PolicyLoss[SapoConfig]):
    """A soft gate on the ratio."""

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        tau, open_share = self._gate(inputs)
        return -inputs.columns["advantages"] * 4 / tau * open_share

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        _, open_share = self._gate(inputs)
        return {"policy/gate": 4 * open_share * (1 - open_share)}

    def _gate(self, inputs: TokenLossInputs) -> tuple[Tensor, Tensor]:
        ratio, advantages = ratio_to_old(inputs), inputs.columns["advantages"]
        positive = torch.full_like(advantages, self.config.tau_positive)
        tau = torch.where(advantages > 0, positive, self.config.tau_negative)
        return tau, torch.sigmoid(tau * (ratio - 1))

    def describe_surrogate(self) -> str:
        return (
            "SAPO: minus advantage times a soft gate on the probability ratio to the policy before the update, of "
            f"temperature {self.config.tau_positive:g} for positive and {self.config.tau_negative:g} for negative ones"
        )
