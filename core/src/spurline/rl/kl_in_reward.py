"""Charge the distance from the reference model to the reward of each token.

    r'_t = r_t - beta * kl_t,  with d_t = log p_ref(t) - log p(t):
    k1: -d_t    k2: d_t^2 / 2    k3: exp(d_t) - 1 - d_t

Place on the way: scored turns and their logprobs under policy and reference -> rewards -> advantages. This is the
KL-in-reward of InstructGPT (Ouyang et al. 2022, arXiv:2203.02155), whose estimator is k1: unbiased, and harmless here,
where it is not differentiated. Names of the estimators: Schulman 2020, "Approximating KL Divergence".
The KL term of a loss is `spurline.losses.kl`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

_LARGEST_EXPONENT = 20.0


def token_kl(
    logprobs: NDArray[np.float32],
    reference_logprobs: NDArray[np.float32],
    estimator: Literal["k1", "k2", "k3"],
) -> NDArray[np.float64]:
    """KL of each response token of a turn from the reference model, in nats; all arrays [A]."""
    distance = reference_logprobs.astype(np.float64) - logprobs
    if estimator == "k1":
        return -distance
    if estimator == "k2":
        return distance**2 / 2
    return np.exp(np.clip(distance, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)) - 1 - distance


def subtract_kl(rewards: NDArray[np.float32], kl: NDArray[np.float64], *, coefficient: float) -> NDArray[np.float32]:
    """Rewards of a turn's response tokens less their KL; all arrays [A]."""
    return (rewards - coefficient * kl).astype(np.float32)
