"""The plain policy gradient (REINFORCE, Williams 1992; Sutton et al. 2000).

    l = -A log p

or with `importance_ratio`, for batches of several optimizer steps, where p moves away from the old policy:

    l = -A p / p_old

whose gradient is the former gradient times the ratio. Neither bounds the step, as `ppo` does.
"""

from __future__ import annotations

from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_rl.losses.configs import PolicyGradientConfig
from spurline_rl.losses.policy_loss import PolicyLoss, ratio_to_old


class PolicyGradient(PolicyLoss[PolicyGradientConfig]):
    """-A log p, or -A p / p_old."""

    def surrogate_needs(self) -> frozenset[str]:
        return frozenset({"advantages", "old_logprobs"} if self.config.importance_ratio else {"advantages"})

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        factor = ratio_to_old(inputs) if self.config.importance_ratio else inputs.logprobs
        return -inputs.columns["advantages"] * factor

    def describe_surrogate(self) -> str:
        what = (
            "probability ratio to the policy before the update" if self.config.importance_ratio else "log-probability"
        )
        return f"Policy gradient: minus advantage times {what}"
