"""Compute the experts of a layer by grouped matrix products, in the dtype of autocast.

The products are those of transformers, for all families that store the experts of a layer as one tensor. Autocast does
not know grouped products. Without this module, experts would compute in the dtype of their weights, and on a GPU
grouped products in fp32 are a loop over experts that waits for the device. In bf16 they are one kernel without a wait.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

EXPERTS_NAME = "spurline_grouped"
"""The name of `grouped_experts` among the experts implementations of transformers."""


def grouped_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the sums [T, H] of the outputs of the `chosen` experts [T, top_k], times their `weights` [T, top_k].

    Under autocast, `hidden` [T, H] and the weights of experts are rounded once per call. The result has the dtype of
    `hidden`.
    """
    if not torch.is_autocast_enabled(hidden.device.type):
        return grouped_mm_experts_forward(experts, hidden, chosen, weights)
    dtype = torch.get_autocast_dtype(hidden.device.type)
    rounded = cast(nn.Module, _Rounded(experts, dtype))
    return grouped_mm_experts_forward(rounded, hidden.to(dtype), chosen, weights).to(hidden.dtype)


class _Rounded:
    """A module of experts, with matrices in another dtype. Biases keep theirs, so that their gradients sum exactly."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, Tensor) and value.ndim == 3 else value


ExpertsInterface.register(EXPERTS_NAME, grouped_experts)
