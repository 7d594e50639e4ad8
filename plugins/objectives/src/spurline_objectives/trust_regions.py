"""Trust regions around the policy that sampled: losses `dppo` and `ppo_per_row`, correction `kpop`.

In the formulas A is the advantage, p the policy, and q the policy around which the trust region lies, each at the
sampled token. The binary divergence compares two distributions over two events: this token, and any other token.

    D_tv(q, p) = |q - p|
    D_kl(q, p) = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_objectives.configs import DppoConfig, KpopConfig, PpoPerRowConfig
from spurline_rl.losses.log_ratios import LogRatios
from spurline_rl.losses.policy_loss import PolicyLoss, bounded_exp, clip_fractions, ratio_to_old
from spurline_rl.protocols.correction import Corrected

_SMALLEST = 1e-8
"""Lowest probability of the other tokens in a divergence, so that the logarithm of 0 is never taken."""


def binary_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return D_kl(q, p) from logprobs, in nats."""
    other_q, other_p = (-torch.expm1(each) for each in (log_q, log_p))
    of_others = other_q.clamp(min=_SMALLEST).log() - other_p.clamp(min=_SMALLEST).log()
    return log_q.exp() * (log_q - log_p) + other_q * of_others


class Dppo(PolicyLoss[DppoConfig]):
    """Divergence proximal policy optimisation (DPPO, Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement
    Learning", arXiv:2602.04879; the loss is that of the authors' implementation in verl).

        l = -A sg(min(p / q, max_ratio)) M log p,        where sg stops the gradient
        M = 0 if A > 0 and p > q and D(q, p) > threshold_high
            0 if A <= 0 and p < q and D(q, p) > threshold_low
            1 otherwise

    A clipped ratio limits the relative change of a token's probability. So it stops rare tokens early, and lets likely
    tokens move far. The divergence limits the absolute change. A token outside of the region still gets gradients that
    lead back.
    """

    def surrogate_needs(self) -> frozenset[str]:
        return frozenset({"advantages", "old_logprobs", self._anchor})

    @property
    def _anchor(self) -> str:
        return f"{self.config.anchor}_logprobs"

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        ratio = bounded_exp(inputs.logprobs.detach() - inputs.columns[self._anchor])
        falls, rises = self._outside(inputs)
        weight = ratio.clamp(max=self.config.max_ratio).masked_fill(falls | rises, 0.0)
        return -inputs.columns["advantages"] * weight * inputs.logprobs

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        falls, rises = self._outside(inputs)
        dtype = inputs.logprobs.dtype
        return {
            "policy/clip_fraction_low": falls.to(dtype),
            "policy/clip_fraction_high": rises.to(dtype),
            "policy/divergence": self._divergence(inputs),
        }

    def _divergence(self, inputs: TokenLossInputs) -> Tensor:
        log_q, log_p = inputs.columns[self._anchor], inputs.logprobs.detach()
        return (log_q.exp() - log_p.exp()).abs() if self.config.divergence == "tv" else binary_kl(log_q, log_p)

    def _outside(self, inputs: TokenLossInputs) -> tuple[Tensor, Tensor]:
        """Return which tokens have left the region downwards, and which upwards, while the loss drives them on."""
        low, high = self.config.thresholds
        moved, advantages = inputs.logprobs.detach() - inputs.columns[self._anchor], inputs.columns["advantages"]
        divergence = self._divergence(inputs)
        falls = (advantages <= 0) & (moved < 0) & (divergence > low)
        return falls, (advantages > 0) & (moved > 0) & (divergence > high)

    def describe_surrogate(self) -> str:
        low, high = self.config.thresholds
        around = "the engine's policy" if self.config.anchor == "rollout" else "the policy before the update"
        measure = "total variation" if self.config.divergence == "tv" else "binary KL divergence"
        return (
            f"DPPO: minus advantage times log-probability, weighted by the probability ratio to {around}, 0 where the "
            f"{measure} from it exceeds {low:g} downwards or {high:g} upwards"
        )


class PpoPerRow(PolicyLoss[PpoPerRowConfig]):
    """Proximal policy optimisation with a clipped ratio (Schulman et al. 2017, arXiv:1707.06347), whose bounds are
    columns of the data.

        l = -min(r A, clip(r, 1 - low, 1 + high) A),     r = p / p_old

    Low and high are numbers of the token's row, so that environments in one run may have different bounds. A higher
    upper bound keeps exploration (DAPO, Yu et al. 2025, arXiv:2503.14476), which not every environment needs.
    """

    def surrogate_needs(self) -> frozenset[str]:
        return super().surrogate_needs() | {self.config.clip_low_column, self.config.clip_high_column}

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        ratio, advantages = ratio_to_old(inputs), inputs.columns["advantages"]
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(*self._bounds(inputs)))

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        return clip_fractions(ratio_to_old(inputs), inputs.columns["advantages"], *self._bounds(inputs))

    def _bounds(self, inputs: TokenLossInputs) -> tuple[Tensor, Tensor]:
        low, high = (inputs.columns[name] for name in (self.config.clip_low_column, self.config.clip_high_column))
        return 1 - low, 1 + high

    def describe_surrogate(self) -> str:
        return (
            "PPO: minus advantage times probability ratio to the policy before the update, clipped per token to the "
            f"bounds in the data's columns {self.config.clip_low_column} and {self.config.clip_high_column}"
        )


class Kpop:
    """KPop: factor = p_old / p_rollout if the binary KL divergence is at most `threshold` in both directions, else 0
    (Guo et al. 2026, "Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive Masking Regions").

    `mis` accepts a fixed band of ratios. Here the band is wide for rare tokens and narrow for likely ones, whose
    changes move more probability.
    """

    def __init__(self, config: KpopConfig):
        self.config = config

    def correct(self, ratios: LogRatios) -> Corrected:
        old, rollout = (ratios.column(name).double() for name in ("old_logprobs", "rollout_logprobs"))
        largest = torch.maximum(binary_kl(old, rollout), binary_kl(rollout, old))
        accepted = largest <= self.config.threshold
        factors = torch.where(accepted, bounded_exp(ratios.values), 0.0)
        return Corrected(factors, {"correction/rejected": (~accepted).double()})

    def describe(self) -> str:
        return (
            "KPop: weigh each token by its probability ratio of trainer to engine, 0 where their binary KL divergence "
            f"exceeds {self.config.threshold:g} in either direction."
        )
