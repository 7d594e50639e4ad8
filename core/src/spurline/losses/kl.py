"""KL divergence from the reference model, estimated per token (Schulman 2020, "Approximating KL Divergence").

With d = log p_ref - log p, and tokens drawn from p:

    k1: -d                    unbiased, may be negative; its gradient is 0 on average
    k2: d^2 / 2               biased; its gradient is that of the KL divergence
    k3: exp(d) - 1 - d        unbiased, never negative; what GRPO uses (arXiv:2402.03300)

Differentiable, for the penalty in a loss. In a reward, where nothing is differentiated: `spurline.rl.kl_in_reward`.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from spurline.losses.ratio import bounded_exp


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Nats per token, the shape of the arguments."""
    distance = reference - logprobs
    if estimator == "k1":
        return -distance
    if estimator == "k2":
        return distance.square() / 2
    return bounded_exp(distance) - 1 - distance
