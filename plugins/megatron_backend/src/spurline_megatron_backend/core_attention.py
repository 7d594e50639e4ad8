"""The attention inside of Megatron's attention layer: rotary positions, then causal attention within each segment.

Place on the way: queries, keys and values of a rank's tokens and heads -> rotated -> exchanged with the ranks that
share the stream, where some do -> core's `attend_segments` -> back. It takes the place of `DotProductAttention` in the
layer spec, which computes no packed sequences, and of TransformerEngine's, which computes nothing without a GPU. A
stream's segments and rotations come in the object that Megatron hands to every layer as `packed_seq_params`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from spurline_megatron_backend.rotary import Rotary, Rotation
from spurline_models.streams.segment_attention import Scores, attend_segments
from spurline_models.streams.token_stream import SegmentPlan, TokenStream


@dataclass(kw_only=True)
class StreamParams(PackedSeqParams):
    """A stream as every layer gets it; this rank computes the whole of it or a part.

    rotation, routed_experts, num_fill, num_tokens: of the rank's own tokens. plan: of all tokens of the stream.
    """

    plan: SegmentPlan
    rotation: Rotation
    routed_experts: Tensor | None = None
    num_fill: int = 0
    num_tokens: int = 0


def packed_params(part: TokenStream, rotary: Rotary) -> StreamParams:
    """Describe the stream, or the part of one, that the model runs on."""
    plan = part.plan
    return StreamParams(
        # Of Megatron's own fields only this one is read: it makes queries, keys and values [T, heads, D].
        qkv_format="thd",
        cu_seqlens_q=plan.cu_seqlens,
        cu_seqlens_kv=plan.cu_seqlens,
        max_seqlen_q=plan.max_length,
        max_seqlen_kv=plan.max_length,
        plan=plan,
        rotation=rotary.at(part.position_ids),
        routed_experts=part.routed_experts,
        num_fill=part.num_fill,
        num_tokens=part.num_tokens,
    )


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
        """Query [T, H, D], key and value [T, K, D] of this rank's tokens and heads -> [T, H * D].

        A collective of the ranks that share the stream.
        """
        assert isinstance(packed_seq_params, StreamParams), type(packed_seq_params)
        assert attention_mask is None
        assert attention_bias is None
        query, key = packed_seq_params.rotation(query, key)
        output = attend_segments(query, key, value, packed_seq_params.plan, Scores(self._scale))
        return output.flatten(1)
