"""Compute the common form of policy losses: a surrogate, plus a KL penalty, minus an entropy bonus.

    l = surrogate + kl.coefficient * KL(p || p_ref) - entropy_coefficient * H(p)

A new policy loss is a subclass with `surrogate` and `describe_surrogate`, and a config that derives from
`PolicyLossConfig`. The base class adds KL and entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_rl.losses.configs import PolicyLossConfig

Config = TypeVar("Config", bound=PolicyLossConfig)

LARGEST_LOG_RATIO = 20.0
"""Ratios are limited to exp(-20)..exp(20), about 5e8, so that no ratio becomes infinite."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the log ratio limited to -20..20. The gradient is 0 outside these limits."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate the KL divergence from the reference per token, in nats. It is differentiable.

    With d = log p_ref - log p, and tokens drawn from p (Schulman 2020, "Approximating KL Divergence"):

        k1: -d                    unbiased, may be negative; its gradient is 0 on average
        k2: d^2 / 2               biased; its gradient is the gradient of the KL divergence
        k3: exp(d) - 1 - d        unbiased, never negative; used by GRPO (arXiv:2402.03300)
    """
    distance = reference - logprobs
    if estimator == "k1":
        return -distance
    if estimator == "k2":
        return distance.square() / 2
    return bounded_exp(distance) - 1 - distance


class PolicyLoss(Generic[Config]):
    """Base of losses that raise the probability of tokens with positive advantage."""

    def __init__(self, config: Config):
        self.config = config
        self.needs = self.surrogate_needs()
        if config.kl.coefficient > 0:
            self.needs |= {"reference_logprobs"}
        if config.entropy_coefficient > 0 or config.entropy_metric:
            self.needs |= {"entropy"}

    def surrogate_needs(self) -> frozenset[str]:
        """Return the columns that the surrogate reads."""
        return frozenset({"advantages", "old_logprobs"})

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        """Return the losses without KL penalty and entropy bonus, [N]."""
        raise NotImplementedError("subclass PolicyLoss with surrogate(self, inputs)")

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """Return metrics of the surrogate by name, [N] each."""
        return {}

    def describe_surrogate(self) -> str:
        """Describe the surrogate in a sentence without a full stop."""
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
            ratio = ratio_to_old(inputs)
            found |= {"policy/ratio": ratio, "policy/ratio/max": ratio, "policy/ratio/min": ratio}
            # The tokens are drawn from the old policy, so the arguments are swapped.
            found["policy/kl_old"] = kl_estimate(inputs.columns["old_logprobs"], inputs.logprobs, "k3")
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
    """Return the probability of each token over its probability before the update, [N]. Differentiable."""
    return bounded_exp(inputs.logprobs - inputs.columns["old_logprobs"])


def clip_fractions(ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor) -> dict[str, Tensor]:
    """Return two metrics, which are 1 for tokens without gradient in a clipped surrogate, else 0.

    A token has no gradient if its ratio is below `low` and its advantage negative, or its ratio is above `high` and its
    advantage positive.
    """
    return {
        "policy/clip_fraction_low": ((ratio < low) & (advantages < 0)).to(ratio.dtype),
        "policy/clip_fraction_high": ((ratio > high) & (advantages > 0)).to(ratio.dtype),
    }


def _entropy(inputs: TokenLossInputs) -> Tensor:
    assert isinstance(inputs.entropy, torch.Tensor), "the loss needs entropy and got none"
    return inputs.entropy
