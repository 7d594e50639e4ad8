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
        if not len(permuted_local_hidden_states):
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        hidden, experts = permuted_local_hidden_states, list[Any](self.local_experts)
        ends = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        hidden = _GroupedLinear.apply(hidden, ends, *(expert.linear_fc1.weight for expert in experts))
        hidden = weighted_bias_swiglu_impl(hidden, None, permuted_probs.unsqueeze(-1))
        return _GroupedLinear.apply(hidden, ends, *(expert.linear_fc2.weight for expert in experts)), None


class _GroupedLinear(torch.autograd.Function):
    """Linear layers [outputs, inputs] of several experts. The tokens of expert i end at `ends[i]`.

    The copy that joins the weights is made again in the backward pass. It would take as much memory as the weights.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        return F.grouped_mm(tokens, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        of_tokens = F.grouped_mm(grads[0], torch.stack(weights), offs=ends)
        return of_tokens, None, *F.grouped_mm(grads[0].t(), tokens, offs=ends).unbind()
