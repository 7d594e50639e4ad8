"""Balance a mixture of experts with the sequence-wise balance loss of DeepSeek-V3 (arXiv:2412.19437, eq. 17 to 20).

The loss of a sequence depends only on its own tokens, so packing, micro-batches and ranks do not change it. They would
change a loss over all tokens of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_models.experts.routers import Choice, find_routers
from spurline_models.streams.token_stream import TokenStream


def balance_coefficient(model: ModelConfig, causal: PreTrainedModel) -> float:
    """Return the coefficient that `model.router_aux_loss` sets. Raises ModelError if the model has no routers."""
    wanted = model.router_aux_loss
    assert wanted is not None
    if not find_routers(causal):
        raise ModelError(
            f"model.router_aux_loss is {wanted}, and {model.path} ({type(causal).__name__}) has no routers to balance. "
            "Remove model.router_aux_loss."
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

    A layer has E experts, and each token gets k of them. The layer's balance for a sequence of T tokens is the sum of
    f * P over experts. f is E / (k T) times the number of tokens that the expert gets, and has no gradient. P is the
    mean of the expert's share (`Choice.shares`) over the tokens. If all experts get equally many tokens, the balance
    is 1. The balance of the sequence is the mean over all layers.
    """

    def __init__(self, stream: TokenStream) -> None:
        plan = stream.plan
        starts = plan.cu_seqlens.long()
        lengths, tokens = starts.diff(), int(plan.lengths.sum())
        self._segment_of_token = torch.repeat_interleave(lengths, output_size=tokens)
        has_loss = torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
        has_loss[stream.segment_index] = True
        self._weights = has_loss.double() / lengths.square()
        self._sum = self._weights.new_zeros(())
        self.unknown = ""
        """The class name of a router whose shares are not known, or empty if all are known."""

    def add(self, choice: Choice, counted: slice | Tensor, tokens: slice, num_layers: int) -> None:
        """Add the choice that one router made in one pass, for a model that has `num_layers` layers with a router.

        `counted` selects the tokens of the pass that are not padding. `tokens` are their positions in the stream.
        """
        shares, experts = choice.shares()[counted], choice.experts[counted]
        segments = self._segment_of_token[tokens]
        num_experts, top_k = shares.shape[1], experts.shape[1]
        zeros = shares.new_zeros(len(self._weights) * num_experts)
        places = (segments[:, None] * num_experts + experts).flatten()
        taken = zeros.scatter_add(0, places, shares.new_ones(len(places))).view(-1, num_experts)
        shared = zeros.view(-1, num_experts).index_add(0, segments, shares)
        value = ((taken * shared).sum(1) * self._weights).sum() * (num_experts / top_k / num_layers)
        self._sum = self._sum + value

    def total(self) -> Tensor:
        """Return the differentiable sum over the sequences that have loss."""
        return self._sum
