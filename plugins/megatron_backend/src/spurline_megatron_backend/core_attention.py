"""The attention inside of Megatron's attention layer: rotary positions, then causal attention within each segment.

Place on the way: queries, keys and values of a rank's tokens and heads -> rotated -> exchanged with the ranks that
share the stream, if any do -> core's `attend_segments` -> back. It replaces `DotProductAttention`, which computes no
packed sequences, in the layer spec. A stream's segments and rotations come in the object that Megatron hands to every
layer as `packed_seq_params`.
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


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines [T, D] of each token's angles, in the dtype of the activations."""

    cos: Tensor
    sin: Tensor

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Turn queries [T, H, D] and keys [T, K, D] by the angles of their tokens."""
        return apply_rotary_pos_emb(query, key, self.cos, self.sin, unsqueeze_dim=1)


class Rotary:
    """Rotary positions by the code of transformers, so that logprobs are those of the Hugging Face model.

    Megatron's own embedding takes positions from the place of a token in its sequence, and rounds differently in half
    precision. Here each token of a stream has its position, so that a part of the stream can be computed alone. Angles
    are computed in fp32. The model's rope type must compute them from positions alone.
    """

    def __init__(self, config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
        # Llama, Qwen 2, Qwen 3 and Qwen 3 MoE all have this module, each under another name.
        self._embedding = LlamaRotaryEmbedding(config).to(device)  # pyright: ignore[reportArgumentType]
        self._like = torch.empty(0, dtype=dtype, device=device)

    def at(self, position_ids: Tensor) -> Rotation:
        """Return the rotation of tokens at these positions [1, T]."""
        cos, sin = self._embedding(self._like, position_ids)
        return Rotation(cos.squeeze(0), sin.squeeze(0))


@dataclass(kw_only=True)
class StreamParams(PackedSeqParams):
    """A stream as every layer gets it: the tokens that this rank computes, and their rotation."""

    part: TokenStream
    rotation: Rotation


def packed_params(part: TokenStream, rotary: Rotary) -> StreamParams:
    """Describe the stream, or the part of one, that the model runs on."""
    # Megatron reads only this field: it makes queries, keys and values [T, heads, D].
    return StreamParams(qkv_format="thd", part=part, rotation=rotary.at(part.position_ids))


class SegmentCoreAttention(MegatronModule):
    """Takes the arguments of Megatron's `DotProductAttention`; has no parameters."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        asked = (attn_mask_type, attention_type, attention_dropout or config.attention_dropout, config.window_size)
        assert asked == (AttnMaskType.causal, "self", 0.0, None), asked
        assert config.softmax_type == "vanilla", config.softmax_type
        assert not config.apply_query_key_layer_scaling
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

        A collective of the ranks that share the stream.
        """
        assert isinstance(packed_seq_params, StreamParams), type(packed_seq_params)
        assert attention_mask is None
        assert attention_bias is None
        query, key = packed_seq_params.rotation(query, key)
        output = attend_segments(query, key, value, packed_seq_params.part.plan, Scores(self._scale))
        return output.flatten(1)
