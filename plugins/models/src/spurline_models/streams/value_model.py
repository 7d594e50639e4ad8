"""The critic: a model that reads token streams as the policy does, with a value head for its output layer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spurline.protocols.loss import TokenLossInputs
from spurline_models.streams.stream_model import StreamModel
from spurline_models.streams.token_stream import TokenStream


class ValueModel(StreamModel):
    """The run's decoder with a value head.

    The `logprobs` of its loss inputs are values: from the position before a token, the return expected from it on.
    """

    def __init__(self, causal: PreTrainedModel):
        if not isinstance(causal.get_output_embeddings(), ValueHead):
            put_value_head(causal)
        super().__init__(causal)

    def loss_inputs(self, stream: TokenStream, needs: Collection[str], temperature: float = 1.0) -> TokenLossInputs:
        """Return the inputs of a critic's loss, without temperature and entropy.

        The critic's routers choose for themselves: no engine has computed its weights.
        """
        hidden = self.hidden(stream.input_ids, stream.position_ids, stream.plan, num_fill=stream.num_fill)
        hidden = hidden.index_select(0, stream.source)
        values = self.head(hidden)
        return TokenLossInputs(values, stream.segment_index, stream.plan.num_segments, stream.columns)


class ValueHead(nn.Linear):
    """A layer from hidden states [N, H] to values [N], which are 0 at first: first advantages are sums of rewards."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        # Autocast would round a matrix product to half precision, and values are subtracted from each other.
        return (hidden.to(self.weight.dtype) * self.weight).sum(-1)


def put_value_head(causal: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Replace the output layer by a value head, on the device of the model, and in its dtype if none is given."""
    with torch.device(causal.device):
        head = ValueHead(causal.config.get_text_config().hidden_size)
    causal.set_output_embeddings(head.to(dtype or causal.dtype))
