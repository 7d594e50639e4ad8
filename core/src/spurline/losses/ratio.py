"""The probability ratio of two models on the same tokens, from their logprobs.

    r = exp(log p - log q)

Place on the way: logprobs of two models -> ratio -> policy losses, KL, corrections.
"""

from __future__ import annotations

from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Ratios beyond exp(20), about 5e8, are taken for exp(20), and likewise downwards: no infinity, no 0 * infinity."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, without overflow; its gradient is 0 beyond the bound."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
