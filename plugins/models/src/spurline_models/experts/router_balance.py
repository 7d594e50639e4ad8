"""The loss that keeps a mixture of experts balanced: how evenly routers spread the tokens of each sequence.

Place on the way: choices of routers -> one number per sequence -> their sum, which is added to the objective. It is the
sequence-wise balance loss of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20). A sequence's value depends on its own
tokens alone, and all are divided by the sequences of the whole mini-batch. So it does not matter how rows are packed,
cut into micro-batches or dealt to ranks, which it does for losses over the tokens of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_models.experts.routers import Choice, find_routers
from spurline_models.streams.token_stream import TokenStream


@dataclass(frozen=True)
class BalanceLoss:
    """What is added to an objective: coefficient * (sum of the sequences' values) / num_sequences.

    num_sequences: those with loss in the whole mini-batch, over all micro-batches and ranks.
    """

    coefficient: float
    num_sequences: int


def balance_coefficient(model: ModelConfig, causal: PreTrainedModel) -> float:
    """What `model.router_aux_loss`, which is set, asks for. Raises ModelError for a model without such a loss."""
    wanted = model.router_aux_loss
    assert wanted is not None
    if not find_routers(causal):
        raise ModelError(
            f"model.router_aux_loss is {wanted}, and {model.path} ({type(causal).__name__}) has no routers to balance. "
            "Remove it."
        )
    if wanted != "config":
        return wanted
    found = getattr(causal.config.get_text_config(), "router_aux_loss_coef", None)
    if not found:
        raise ModelError(
            f"model.router_aux_loss is config, and the config of {model.path} has no router_aux_loss_coef above 0. Set "
            "model.router_aux_loss to a number, such as 0.001, or remove it."
        )
    return float(found)


class StreamBalance:
    """The balance of the sequences of one stream, summed while routers run.

    A sequence of T tokens has, in a layer with E experts of which a token gets k, the value sum over experts of f * P:
    f = E / (k T) * tokens that went to the expert, which has no gradient; P = the mean over tokens of the expert's
    share. It is 1 where all experts get equally much. Layers count as their mean.
    """

    def __init__(self, stream: TokenStream) -> None:
        plan = stream.plan
        starts = plan.cu_seqlens.long()
        lengths, tokens = starts.diff(), int(plan.lengths.sum())
        self._segment_of_token = torch.repeat_interleave(lengths, output_size=tokens)
        has_loss = torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
        has_loss[stream.segment_index] = True
        self._weights = has_loss.double() / lengths.square()
        self._sum: Tensor | None = None
        self.unknown = ""
        """Class of a router of which it is not known how it shares tokens out; it is not summed."""

    def add(self, choice: Choice, counted: slice | Tensor, tokens: slice, num_layers: int) -> None:
        """Take in what a router chose in a pass. counted: its tokens that are some of the stream's, `tokens` of it.

        num_layers: of the model that have a router.
        """
        shares, experts = choice.shares()[counted], choice.experts[counted]
        segments = self._segment_of_token[tokens]
        num_experts, top_k = shares.shape[1], experts.shape[1]
        zeros = shares.new_zeros(len(self._weights) * num_experts)
        places = (segments[:, None] * num_experts + experts).flatten()
        taken = zeros.scatter_add(0, places, shares.new_ones(len(places))).view(-1, num_experts)
        shared = zeros.view(-1, num_experts).index_add(0, segments, shares)
        value = ((taken * shared).sum(1) * self._weights).sum() * (num_experts / top_k / num_layers)
        self._sum = value if self._sum is None else self._sum + value

    def total(self) -> Tensor:
        """Sum of the values of the sequences that have loss, differentiable."""
        return self._weights.new_zeros(()) if self._sum is None else self._sum
