"""Compute the experts of a rank with one grouped matrix product for each layer of their MLPs.

The experts keep Megatron's parameters, one for each expert. Megatron's own module computes one expert after the other,
and its grouped modules need TransformerEngine or another package, and arrange weights in another way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class GroupedExperts(SequentialMLP):
    """The experts of one layer on this rank: gated SiLU without biases."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the outputs [T, H] of T tokens, which are sorted by expert, times `permuted_probs` [T].

        `tokens_per_expert` is int64 [experts of this rank], on any device.
        """
        hidden = permuted_local_hidden_states
        ends = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        hidden = F.grouped_mm(hidden, self._stacked("linear_fc1"), offs=ends)
        hidden = weighted_bias_swiglu_impl(hidden, None, permuted_probs.unsqueeze(-1))
        return F.grouped_mm(hidden, self._stacked("linear_fc2"), offs=ends), None

    def _stacked(self, layer: str) -> Tensor:
        """Return the weights of all experts in this linear layer: [experts, inputs, outputs]."""
        experts: list[Any] = list(self.local_experts)
        return torch.stack([getattr(expert, layer).weight for expert in experts]).transpose(1, 2)
