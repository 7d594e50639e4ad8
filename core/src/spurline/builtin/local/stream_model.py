"""A causal language model that reads token streams: decoder, then logprobs where there is loss.

Place on the way: `TokenStream` -> this -> `TokenLossInputs`. It owns no optimizer and no loop; the trained model and a
frozen reference are two of these, a critic is a `ValueModel`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spurline.builtin.local.microbatches import TokenStream
from spurline.builtin.local.segment_attention import ATTENTION_NAME
from spurline.builtin.local.segment_plan import SegmentPlan
from spurline.builtin.local.token_logprobs import TokenLogprobs
from spurline.errors import ModelError
from spurline.protocols.loss import TokenLossInputs

ENTROPY = "entropy"


class StreamModel:
    """`causal`, with the attention that keeps segments apart."""

    def __init__(self, causal: PreTrainedModel, chunk_tokens: int):
        self.causal = causal
        use_segment_attention(causal)
        head = causal.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(causal).__name__} has no output embeddings. Choose a causal language model.")
        self.decoder: nn.Module = causal.get_decoder()
        self.head: nn.Module = head
        self.score = TokenLogprobs(head, chunk_tokens)
        self._run_decoder: Any = self.decoder

    def checkpoint_activations(self, options: dict[str, Any]) -> None:
        """Keep only the inputs of layers and recompute the rest in the backward pass.

        options: keywords of `torch.utils.checkpoint.checkpoint`.
        """
        # transformers renamed the method in the course of version 5.
        enable: Any = getattr(self.causal, "activation_checkpointing_enable", None)
        (enable or self.causal.gradient_checkpointing_enable)(options)

    def compile(self) -> None:
        """Run the decoder through torch.compile from now on; attention stays outside its graphs."""
        self._run_decoder = torch.compile(self.decoder, dynamic=True)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, plan: SegmentPlan) -> Tensor:
        """Last hidden states [T, H] of a stream [1, T]."""
        output = self._run_decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            segment_plan=plan,
            # What packed models other than plain attention ask for, under the names of transformers.
            cu_seq_lens_q=plan.cu_seqlens,
            cu_seq_lens_k=plan.cu_seqlens,
            max_length_q=plan.max_length,
            max_length_k=plan.max_length,
        )
        return output.last_hidden_state.squeeze(0)

    def loss_inputs(self, stream: TokenStream, needs: Collection[str], temperature: float = 1.0) -> TokenLossInputs:
        """What a loss with these `needs` sees of the stream."""
        hidden = self.hidden(stream.input_ids, stream.position_ids, stream.plan).index_select(0, stream.source)
        logprobs, entropy = self.score(hidden, stream.targets, ENTROPY in needs, temperature)
        return TokenLossInputs(logprobs, stream.segment_index, stream.plan.num_segments, stream.columns, entropy)


def use_segment_attention(causal: PreTrainedModel) -> None:
    """Route all attention of the model through `segment_attention`. Raises ModelError."""
    causal.set_attn_implementation(ATTENTION_NAME)
    if causal.config._attn_implementation != ATTENTION_NAME:
        raise ModelError(
            f"{type(causal).__name__} does not let its attention be replaced, so sequences cannot be kept apart. "
            "Choose one whose transformers code uses AttentionInterface: Llama, Qwen, Mistral, Gemma 3, OLMo, Phi, ..."
        )


def vocabulary_size(causal: PreTrainedModel) -> int:
    """Rows of the embedding; models may round the tokenizer's vocabulary up."""
    weight = causal.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


@contextmanager
def evaluation_mode(causal: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients. Not torch's inference mode: tables that models cache meanwhile, such as
    rotary frequencies, must stay usable in the next training step."""
    was_training = causal.training
    causal.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        causal.train(was_training)
