"""Rotary positions, computed by the code of transformers, so that logprobs are those of the Hugging Face model.

Megatron's own rotary embedding is not used: it takes positions from the place of a token in its sequence and rounds
differently in half precision. Here positions are those of the stream, token by token, which is also what makes a part
of a stream computable alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

# Frequencies of the other types depend on the longest sequence of a call.
ROPE_TYPES = ("default", "linear", "llama3")
"""Types of `rope_parameters` whose angles depend on nothing but a token's position."""


@dataclass(frozen=True)
class Rotation:
    """cos, sin: [T, D], of each token's angles, in the dtype that is computed in."""

    cos: Tensor
    sin: Tensor

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query [T, H, D] and key [T, K, D], turned by the angles of their tokens."""
        return apply_rotary_pos_emb(query, key, self.cos, self.sin, unsqueeze_dim=1)


class Rotary:
    """The rotations of a Hugging Face model with this config, whose rope type must be one of `ROPE_TYPES`.

    dtype: of the model's activations. Angles are fp32 whatever it is.
    """

    def __init__(self, config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
        # Llama, Qwen 2, Qwen 3 and Qwen 3 MoE all have this very module under names of their own.
        self._embedding = LlamaRotaryEmbedding(config)  # pyright: ignore[reportArgumentType]
        assert self._embedding.rope_type in ROPE_TYPES, self._embedding.rope_type
        self._embedding.to(device)
        self._like = torch.empty(0, dtype=dtype, device=device)

    def at(self, position_ids: Tensor) -> Rotation:
        """The rotation of tokens at these positions [1, T]."""
        cos, sin = self._embedding(self._like, position_ids)
        return Rotation(cos.squeeze(0), sin.squeeze(0))
