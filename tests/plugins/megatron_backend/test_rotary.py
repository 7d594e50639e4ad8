"""Rotations are bit for bit those of the Hugging Face models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from spurline_megatron_backend.rotary import Rotary

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}

MODELS: list[Any] = [
    pytest.param(LlamaConfig(**SIZES, rope_parameters=DEFAULT), modeling_llama.LlamaRotaryEmbedding, id="llama"),
    pytest.param(LlamaConfig(**SIZES, rope_parameters=LLAMA3), modeling_llama.LlamaRotaryEmbedding, id="llama3"),
    pytest.param(LlamaConfig(**SIZES, rope_parameters=LINEAR), modeling_llama.LlamaRotaryEmbedding, id="linear"),
    pytest.param(Qwen2Config(**SIZES, rope_parameters=DEFAULT), modeling_qwen2.Qwen2RotaryEmbedding, id="qwen2"),
    pytest.param(
        Qwen3Config(**SIZES, head_dim=24, rope_parameters=DEFAULT), modeling_qwen3.Qwen3RotaryEmbedding, id="qwen3"
    ),
    pytest.param(
        Qwen3MoeConfig(**SIZES, head_dim=24, rope_parameters=LINEAR),
        modeling_qwen3_moe.Qwen3MoeRotaryEmbedding,
        id="qwen3_moe",
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("config", "embedding"), MODELS)
def test_queries_and_keys_are_turned_as_in_the_model(
    config: PretrainedConfig, embedding: Any, dtype: torch.dtype
) -> None:
    size = getattr(config, "head_dim", None) or 8
    positions = torch.tensor([[0, 0, 1, 2, 3, 0, 1, 500, 4095]])
    query, key = torch.randn(1, 9, 4, size).to(dtype), torch.randn(1, 9, 2, size).to(dtype)
    cos, sin = embedding(config)(query, positions)
    module = modeling_qwen3 if "qwen3" in config.model_type else modeling_llama
    # The models have heads before tokens.
    expected = module.apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    rotation = Rotary(config, torch.device("cpu"), dtype).at(positions)
    got = rotation(query[0], key[0])
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other[0].transpose(0, 1))


def test_a_type_whose_angles_depend_on_the_longest_sequence_is_not_taken() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(AssertionError, match="dynamic"):
        Rotary(LlamaConfig(**SIZES, rope_parameters=parameters), torch.device("cpu"), torch.float32)
