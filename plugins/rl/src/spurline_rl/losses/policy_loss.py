"""Compute the common form of policy losses: a surrogate, plus a KL penalty, minus an entropy bonus.

    l = surrogate + kl.coefficient * KL(p || p_ref) - entropy_coefficient * H(p)

A new policy loss is a subclass with `surrogate` and `describe_surrogate`, and a config that derives from
`PolicyLossConfig`. KL and entropy come with it, and only what the config asks for has to be provided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_rl.losses.configs import PolicyLossConfig

LARGEST_LOG_RATIO = 20.0
"""Ratios beyond exp(20), about 5e8, are taken for exp(20), and likewise downwards: no infinity, no 0 * infinity."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, without overflow; its gradient is 0 beyond the bound."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL divergence from the reference, estimated per token in nats; all tensors of one shape. Differentiable.

    With d = log p_ref - log p, and tokens drawn from p (Schulman 2020, "Approximating KL Divergence"):

        k1: -d                    unbiased, may be negative; its gradient is 0 on average
        k2: d^2 / 2               biased; its gradient is that of the KL divergence
        k3: exp(d) - 1 - d        unbiased, never negative; what GRPO uses (arXiv:2402.03300)
    """
    distance = reference - logprobs
    if estimator == "k1":
        return -distance
    if estimator == "k2":
        return distance.square() / 2
    return bounded_exp(distance) - 1 - distance


class PolicyLoss:
    """Base of losses that raise the probability of tokens with positive advantage."""

    def __init__(self, config: PolicyLossConfig):
        self.config = config
        self.needs = self.surrogate_needs()
        if config.kl.coefficient > 0:
            self.needs |= {"reference_logprobs"}
        if config.entropy_coefficient > 0 or config.entropy_metric:
            self.needs |= {"entropy"}

    def surrogate_needs(self) -> frozenset[str]:
        """The columns that the surrogate itself reads."""
        return frozenset({"advantages", "old_logprobs"})

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        """[N] losses before penalty and bonus."""
        raise NotImplementedError("subclass PolicyLoss with surrogate(self, inputs)")

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """Named [N] values of the surrogate."""
        return {}

    def describe_surrogate(self) -> str:
        """Say the surrogate in words, without a full stop."""
        raise NotImplementedError("subclass PolicyLoss with describe_surrogate(self)")

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        loss = self.surrogate(inputs)
        if self.config.kl.coefficient > 0:
            loss = loss + self.config.kl.coefficient * self._kl_to_reference(inputs)
        if self.config.entropy_coefficient > 0:
            loss = loss - self.config.entropy_coefficient * _entropy(inputs)
        return loss

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        found = dict(self.surrogate_metrics(inputs))
        if "old_logprobs" in self.needs:
            found |= _distance_from_old(inputs)
        if "reference_logprobs" in self.needs:
            found["policy/kl_reference"] = self._kl_to_reference(inputs)
        if "entropy" in self.needs:
            found["policy/entropy"] = _entropy(inputs)
        return found

    def describe(self) -> str:
        parts = [self.describe_surrogate()]
        if self.config.kl.coefficient > 0:
            kl = self.config.kl
            parts.append(f"plus {kl.coefficient:g} times the KL divergence from the reference model ({kl.estimator})")
        if self.config.entropy_coefficient > 0:
            parts.append(f"minus {self.config.entropy_coefficient:g} times the entropy")
        return "; ".join(parts) + "."

    def _kl_to_reference(self, inputs: TokenLossInputs) -> Tensor:
        return kl_estimate(inputs.logprobs, inputs.columns["reference_logprobs"], self.config.kl.estimator)


def ratio_to_old(inputs: TokenLossInputs) -> Tensor:
    """[N] probability of each token over the one before the update, differentiable."""
    return bounded_exp(inputs.logprobs - inputs.columns["old_logprobs"])


def clip_fractions(ratio: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """1 where a clipped surrogate has no gradient: below `low` with negative, above `high` with positive advantage."""
    return {
        "policy/clip_fraction_low": ((ratio < low) & (advantages < 0)).to(ratio.dtype),
        "policy/clip_fraction_high": ((ratio > high) & (advantages > 0)).to(ratio.dtype),
    }


def _distance_from_old(inputs: TokenLossInputs) -> dict[str, Tensor]:
    ratio = ratio_to_old(inputs)
    return {
        "policy/ratio": ratio,
        "policy/ratio/max": ratio,
        "policy/ratio/min": ratio,
        # k3 with tokens drawn from the old policy, hence the ratio the other way round than for the reference.
        "policy/kl_old": kl_estimate(inputs.columns["old_logprobs"], inputs.logprobs, "k3"),
    }


def _entropy(inputs: TokenLossInputs) -> Tensor:
    assert isinstance(inputs.entropy, torch.Tensor), "the loss asked for entropy and got none"
    return inputs.entropy
