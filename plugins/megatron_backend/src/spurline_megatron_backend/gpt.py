"""This rank's part of a decoder.

Place on the way: this rank's tokens, or hidden states of the stage before -> `HiddenGPT` -> hidden states for the next
stage; on the last stage -> `loss_inputs`, which computes logprobs, or a critic's values, at the positions with loss.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.protocols.loss import ENTROPY, TokenLossInputs
from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid, Place
from spurline_megatron_backend.parts import padded_vocabulary
from spurline_megatron_backend.vocab_parallel import VocabularyLogprobs
from spurline_models.streams.stream_model import ValueHead
from spurline_models.streams.token_stream import TokenStream
from spurline_ranks.sequence_sharing import SequenceSharing


@dataclass(frozen=True)
class Groups:
    """The place and the groups of this rank; `context` is None if each rank has its own sequences."""

    grid: Grid
    place: Place
    tensor: ProcessGroup
    context: ProcessGroup | None


class HiddenGPT(GPTModel):
    """A part of a model. The first part has the embedding, and the last has the output layer or a critic's value head.

    At most the logits of `chunk_tokens` positions exist at the same time. On a stage with several parts,
    `virtual_stage` is the number of this part.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerBlockSubmodules,
        architecture: Architecture,
        groups: Groups,
        *,
        critic: bool,
        chunk_tokens: int,
        is_first: bool,
        is_last: bool,
        virtual_stage: int | None,
    ) -> None:
        super().__init__(
            config,
            submodules,  # pyright: ignore[reportArgumentType]
            vocab_size=padded_vocabulary(architecture, groups.grid),
            # Rotary positions have no end.
            max_sequence_length=0,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=architecture.tied and not critic,
            # Attention itself turns queries and keys.
            position_embedding_type="none",
            vp_stage=virtual_stage,
        )
        self._tensor = groups.tensor
        self._padding_token = architecture.padding_token
        self.score: VocabularyLogprobs | None = None
        """Applies the output layer; None without one."""
        if not is_last:
            return
        if critic:
            del self.output_layer
            with torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device()):
                # Values are subtracted from each other: the head computes in fp32.
                self.value_head = ValueHead(config.hidden_size)
        else:
            # The layer sees the hidden states of tokens with loss, out of those of all tokens.
            self.output_layer.sequence_parallel = False
            self.score = VocabularyLogprobs(self._logits, groups.tensor, architecture.vocabulary, chunk_tokens)

    def _preprocess(self, input_ids: Tensor, position_ids: Any, decoder_input: Any = None, **others: Any) -> Any:
        """Return the input of the layers. The first stage embeds this rank's tokens, [tokens, 1, H]."""
        if self.pre_process:
            decoder_input = self._embedded(input_ids)
        return super()._preprocess(input_ids, position_ids, decoder_input, **others)

    def _embedded(self, input_ids: Tensor) -> Tensor:
        embedded = self.embedding(input_ids=input_ids, position_ids=None)
        if self._padding_token is None:
            return embedded
        # torch's embedding does so with `padding_idx`, which transformers sets.
        is_padding = (input_ids[0] == self._padding_token)[:, None, None]
        if self.config.sequence_parallel:
            is_padding = is_padding.chunk(self._tensor.size())[self._tensor.rank()]
        return torch.where(is_padding, embedded.detach(), embedded)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return hidden states [tokens, 1, H] instead of logits, on the last stage of all the tensor group's tokens."""
        if self.post_process and self.config.sequence_parallel:
            # Every rank computes the same loss, and takes the gradient of its own tokens without a sum.
            return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states

    def loss_inputs(
        self,
        hidden: Tensor,
        part: TokenStream,
        mine: slice,
        stream: TokenStream,
        sharing: SequenceSharing,
        needs: Collection[str],
        temperature: float,
    ) -> TokenLossInputs:
        """Compute the inputs of a loss with these `needs`, on every rank of the tensor and context group.

        This rank has the tokens `part` of the stream, with hidden states [tokens, 1, H], and predicts `mine` of the
        positions with loss.
        """
        chosen = hidden.squeeze(1).index_select(0, part.source)
        entropy = None
        if self.score is None:
            values = self.value_head(chosen)
        else:
            values, entropy = self.score(chosen, part.targets, ENTROPY in needs, temperature)
        joined = sharing.joined(values, mine, stream)
        if entropy is not None:
            entropy = sharing.joined(entropy, mine, stream)
        return TokenLossInputs(joined, stream.segment_index, stream.plan.num_segments, stream.columns, entropy)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Compute this rank's columns of the logits, [N, H] -> [N, V / tensor]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden.unsqueeze(1), weight=weight)
        return logits.squeeze(1)
