"""Compute the experts of a layer by grouped matrix products, in the dtype of autocast.

The products are those of transformers, for all families that store the experts of a layer as one tensor. Autocast does
not know them. A GPU computes them with one kernel in bf16, and in fp32 with a loop over experts that waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

EXPERTS_NAME = "spurline_grouped"


def grouped_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the sums [T, H] of the outputs of the `chosen` experts [T, top_k], times their `weights` [T, top_k].

    The result has the dtype of `hidden` [T, H].
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    rounded: Any = _Rounded(experts, dtype)
    return grouped_mm_experts_forward(rounded, hidden.to(dtype), chosen, weights).to(hidden.dtype)


class _Rounded:
    """A module of experts, with matrices in another dtype. Biases keep theirs, so that their gradients sum exactly."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, Tensor) and value.ndim == 3 else value


ExpertsInterface.register(EXPERTS_NAME, grouped_experts)
