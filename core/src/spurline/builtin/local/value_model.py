"""The critic: the run's model with a value head in the place of its output layer.

Place on the way: `TokenStream` -> this -> `TokenLossInputs` whose `logprobs` are values: from the position before a
token, the return that is expected from that token on. Trained as the policy is, by `TrainedModel`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel

from spurline.builtin.local.microbatches import TokenStream
from spurline.builtin.local.stream_model import StreamModel
from spurline.protocols.loss import TokenLossInputs


class ValueModel(StreamModel):
    """A decoder, and one number per token where there is loss."""

    def __init__(self, causal: PreTrainedModel, chunk_tokens: int):
        # Starts at value 0 everywhere, so that the first advantages are plain sums of rewards, and draws nothing.
        head = nn.Linear(causal.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(head.weight)
        causal.set_output_embeddings(head.to(causal.device, causal.dtype))
        super().__init__(causal, chunk_tokens)

    def loss_inputs(self, stream: TokenStream, needs: Collection[str], temperature: float = 1.0) -> TokenLossInputs:
        """What a critic's loss with these `needs` sees of the stream; no logits, so no temperature and no entropy."""
        hidden = self.hidden(stream.input_ids, stream.position_ids, stream.plan).index_select(0, stream.source)
        weight = self.head.weight
        assert isinstance(weight, torch.Tensor)
        # Not a matrix product, which autocast would round to half precision: values are subtracted from each other.
        values = (hidden.to(weight.dtype) * weight).sum(-1)
        return TokenLossInputs(values, stream.segment_index, stream.plan.num_segments, stream.columns)
