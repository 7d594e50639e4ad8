"""The policy losses, which differ in how they limit the change of the policy, and the critic's loss.

In the formulas A is the advantage, p the policy, p_old the policy before the update, and r = p / p_old per token.
`old_logprobs` are the trainer's logprobs before the update.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_rl.losses import configs
from spurline_rl.losses.policy_loss import PolicyLoss, bounded_exp, clip_fractions, ratio_to_old


class PolicyGradient(PolicyLoss[configs.PolicyGradientConfig]):
    """The plain policy gradient (REINFORCE, Williams 1992; Sutton et al. 2000).

        l = -A log p

    With `importance_ratio`, for batches of several optimizer steps:

        l = -A r

    The gradient of the second loss is r times the gradient of the first. Neither loss limits the change of the policy.
    """

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


class Ppo(PolicyLoss[configs.PpoConfig]):
    """Proximal policy optimisation with a clipped ratio (PPO, Schulman et al. 2017, arXiv:1707.06347).

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    `clip_high: 0.28` gives the clip-higher of DAPO (Yu et al. 2025, arXiv:2503.14476). With `dual_clip` = c, the
    loss of tokens with A < 0 is at most -c A (Ye et al. 2020, arXiv:1912.09729). With a `correction`
    for the difference between engine and trainer, this is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641), and
    p_old is its proximal policy.
    """

    def __init__(self, config: configs.PpoConfig):
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
        dual = f", and at most {self.config.dual_clip:g} for negative advantages" if self.config.dual_clip else ""
        return (
            "PPO: minus advantage times probability ratio to the policy before the update, clipped to "
            f"{self._low:g}..{self._high:g} per token{dual}"
        )


class Gspo(PolicyLoss[configs.GspoConfig]):
    """Group sequence policy optimisation (GSPO, Zheng et al. 2025, arXiv:2507.18071).

        s = (p(y) / p_old(y))^(1 / |y|) = exp(mean over the sequence of log p - log p_old)
        l = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)       for each token of the sequence

    All tokens of a sequence share one ratio, so the clip affects whole sequences. A sequence is a segment: the loss
    tokens of one turn, or of all turns that were merged into one row, without tokens that a correction rejected. In the
    paper all sequences have the same weight, as with `reduction: sequence_mean`. If all tokens of a sequence have the
    same advantage, the gradient equals the gradient of GSPO-token in the paper.
    """

    def __init__(self, config: configs.GspoConfig):
        super().__init__(config)
        self._low, self._high = 1 - config.clip_low, 1 + config.clip_high

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        ratio, advantages = _sequence_ratio(inputs), inputs.columns["advantages"]
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(self._low, self._high))

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        ratio = _sequence_ratio(inputs)
        return {
            **clip_fractions(ratio, inputs.columns["advantages"], self._low, self._high),
            "policy/sequence_ratio": ratio,
            "policy/sequence_ratio/max": ratio,
            "policy/sequence_ratio/min": ratio,
        }

    def describe_surrogate(self) -> str:
        return (
            "GSPO: minus advantage times the sequence's mean probability ratio to the policy before the update, "
            f"clipped to {self._low:g}..{self._high:g}"
        )


def _sequence_ratio(inputs: TokenLossInputs) -> Tensor:
    """Return for each token the geometric mean of the ratios in its segment, [N]."""
    log_ratio = inputs.logprobs - inputs.columns["old_logprobs"]
    zeros = log_ratio.new_zeros(inputs.num_segments)
    sums = zeros.index_add(0, inputs.segment_index, log_ratio)
    # `bincount` would wait for the device.
    counts = zeros.index_add(0, inputs.segment_index, torch.ones_like(log_ratio))
    return bounded_exp(sums / counts.clamp(min=1))[inputs.segment_index]


class Cispo(PolicyLoss[configs.CispoConfig]):
    """Clipped importance-sampling policy optimisation (CISPO, MiniMax-M1, MiniMax 2025, arXiv:2506.13585).

        l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p,      where sg stops the gradient

    Only the weight is clipped, so tokens with a ratio outside the bounds keep a gradient. The paper sets no lower bound
    and does not state the upper bound. ScaleRL found that several upper bounds work equally well, including 5, which is
    the default here (Khatri et al. 2025, arXiv:2510.13786).
    """

    def __init__(self, config: configs.CispoConfig):
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


class Sapo(PolicyLoss[configs.SapoConfig]):
    """Soft adaptive policy optimisation (SAPO, Gao et al. 2025, arXiv:2511.20347).

        l = -A * 4 / tau * sigma(tau (r - 1)),      tau = tau_positive where A > 0, else tau_negative

    where sigma is the logistic function. The gradient is the gradient of -A r times a gate 4 sigma (1 - sigma).
    The gate is 1 at r = 1 and closes smoothly on both sides. A higher tau closes it earlier. By default tau is higher
    for A <= 0: lowering a token's probability raises all other probabilities, which makes training less stable.
    """

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
            "SAPO: minus advantage times a soft gate on the probability ratio to the policy before the update, with "
            f"temperature {self.config.tau_positive:g} for positive and {self.config.tau_negative:g} for other "
            "advantages"
        )


class ValueLoss:
    """Half the squared error of a critic's values, clipped around the values before the update (PPO, arXiv:1707.06347).

        l = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

    Here v is the value, v_old the value before the update, and R the return. A value that has moved by `clip` gets no
    gradient to move further. The loss is for `Backend.update(..., role="critic")`, where `inputs.logprobs` are the
    critic's values. The value of a token predicts the return from this token on. `gae` reads `values` and writes
    `returns`.
    """

    needs: frozenset[str] = frozenset({"values", "returns"})

    def __init__(self, config: configs.ValueLossConfig):
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        values, target = inputs.logprobs, inputs.columns["returns"]
        error = (values - target).square()
        if self.config.clip is not None:
            error = torch.maximum(error, (self._clip_values(inputs) - target).square())
        return error / 2

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        found = {"value/predicted": inputs.logprobs, "value/return": inputs.columns["returns"]}
        if self.config.clip is not None:
            moved = self._clip_values(inputs) != inputs.logprobs
            found["value/clip_fraction"] = moved.to(inputs.logprobs.dtype)
        return found

    def describe(self) -> str:
        clip = f", clipped to {self.config.clip:g} around its value before the update" if self.config.clip else ""
        return f"Critic: half the squared difference between value and return{clip}."

    def _clip_values(self, inputs: TokenLossInputs) -> Tensor:
        assert self.config.clip is not None
        old = inputs.columns["values"]
        return torch.clamp(inputs.logprobs, old - self.config.clip, old + self.config.clip)
