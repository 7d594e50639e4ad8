"""One part of a decoder, as this rank holds it.

Data flow: this rank's tokens, or hidden states from the previous stage -> `HiddenGPT` -> hidden states for the
next stage. On the last stage `scores` computes logprobs, or a critic's values, at the positions with loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid, Place
from spurline_megatron_backend.parts import padded_vocabulary
from spurline_megatron_backend.vocab_parallel import VocabularyLogprobs
from spurline_models.architecture import ScalarHead
from spurline_models.streams.stream_model import no_logits
from spurline_models.streams.token_logprobs import LogitReading
from spurline_models.streams.token_stream import TokenStream


@dataclass(frozen=True)
class Groups:
    """The groups of this rank, and its place in the groups. `context` is None if each rank has its own sequences."""

    grid: Grid
    place: Place
    tensor: ProcessGroup
    context: ProcessGroup | None


class HiddenGPT(GPTModel):
    """A part of a model. The first part has the embedding, and the last has the output layer or a critic's value head.

    Args:
        chunk_tokens: The number of positions whose logits are in memory at the same time.
        virtual_stage: The index of this part, or None if the stage has only one part.
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
        critic = critic or architecture.scores
        super().__init__(
            config,
            submodules,  # pyright: ignore[reportArgumentType]
            vocab_size=padded_vocabulary(architecture, groups.grid),
            # Rotary positions have no maximum.
            max_sequence_length=0,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=architecture.tied and not critic,
            # `SegmentCoreAttention` rotates queries and keys.
            position_embedding_type="none",
            vp_stage=virtual_stage,
        )
        self._tensor = groups.tensor
        self._padding_token = architecture.padding_token
        self.score: VocabularyLogprobs | None = None
        """Computes logprobs with the output layer. None if this part has no output layer."""
        if not is_last:
            return
        if critic:
            del self.output_layer
            with torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device()):
                # The head computes in fp32, since differences of its values must be exact.
                self.value_head = ScalarHead(config.hidden_size)
        else:
            # The output layer gets hidden states that are gathered already.
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
        # The padding token is not trained, as in transformers, which sets `padding_idx` of the embedding.
        is_padding = (input_ids[0] == self._padding_token)[:, None, None]
        is_padding = is_padding.chunk(self._tensor.size())[self._tensor.rank()]
        return torch.where(is_padding, embedded.detach(), embedded)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return hidden states [tokens, 1, H] instead of logits. The last stage gathers the tensor group's tokens."""
        if self.post_process and self.config.sequence_parallel:
            # Every rank computes the same loss. So the backward pass does not sum over ranks, and each rank takes the
            # gradients of its own tokens.
            return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states

    def scores(
        self, hidden: Tensor, part: TokenStream, want_entropy: bool, temperature: float, reading: LogitReading | None
    ) -> tuple[Tensor, Tensor | None, Mapping[str, Tensor]]:
        """Return logprobs of a stream's targets (or a critic's values) for hidden states [N, H], the entropy or None,
        and the values of a loss that reads logits."""
        if self.score is None:
            if reading is not None:
                raise no_logits()
            return self.value_head(hidden), None, {}
        if reading is None or part.is_idle:
            return *self.score(hidden, part.targets, want_entropy, temperature, part.support), {}
        return self.score.read(hidden, part, reading, want_entropy, temperature)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Compute this rank's columns of the logits, [N, H] -> [N, V / tensor]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden.unsqueeze(1), weight=weight)
        return logits.squeeze(1)
