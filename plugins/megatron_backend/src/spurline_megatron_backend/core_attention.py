"""Rotate queries and keys, then attend within each segment. This is the inner part of Megatron's attention layer.

Data flow: queries, keys and values of a rank's tokens and heads -> rotated -> exchanged with the ranks that
share the stream, if there are any -> `attend_segments` -> exchanged back. This replaces Megatron's
`DotProductAttention`, which cannot compute packed sequences. Megatron passes an object `packed_seq_params` to every
layer. Here that object is a `StreamParams`, with the segments and the rotation of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from spurline_models.streams.segment_attention import Scores, attend_segments
from spurline_models.streams.token_stream import TokenStream


@dataclass(kw_only=True)
class StreamParams(PackedSeqParams):
    """The tokens that this rank computes, and the cosines and sines [T, D] of their angles. Every layer gets this."""

    part: TokenStream
    cos: Tensor
    sin: Tensor


class Rotary:
    """Rotary positions, computed by the code of transformers, so that logprobs are the same as in transformers.

    Megatron's own embedding counts positions from the beginning of a sequence, and rounds differently in bf16. Here
    each token of a stream has its own position, so that a rank can compute a part of the stream. Angles are in fp32.
    The model's rope type must compute angles only from positions.
    """

    def __init__(self, config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
        # Llama, Qwen 2, Qwen 3 and Qwen 3 MoE all have this module, under different names.
        self._embedding = LlamaRotaryEmbedding(config).to(device)  # pyright: ignore[reportArgumentType]
        self._like = torch.empty(0, dtype=dtype, device=device)

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, D] for tokens at these positions [1, T], in the dtype of the activations."""
        cos, sin = self._embedding(self._like, position_ids)
        return cos.squeeze(0), sin.squeeze(0)


def packed_params(part: TokenStream, rotary: Rotary) -> StreamParams:
    """Describe the tokens of this rank for the layers."""
    cos, sin = rotary.at(part.position_ids)
    # Megatron reads only `qkv_format`, which makes queries, keys and values [T, heads, D].
    return StreamParams(qkv_format="thd", part=part, cos=cos, sin=sin)


class SegmentCoreAttention(MegatronModule):
    """Attention without parameters, with the arguments of Megatron's `DotProductAttention`."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend from queries [T, H, D] to keys and values [T, K, D] of this rank; return [T, H * D].

        This is a collective of the ranks that share the stream.
        """
        assert isinstance(packed_seq_params, StreamParams), type(packed_seq_params)
        assert attention_mask is None
        assert attention_bias is None
        params = packed_seq_params
        query, key = apply_rotary_pos_emb(query, key, params.cos, params.sin, unsqueeze_dim=1)
        output = attend_segments(query, key, value, params.part.plan, Scores(self._scale))
        return output.flatten(1)
