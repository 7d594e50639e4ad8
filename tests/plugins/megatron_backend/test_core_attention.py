"""The attention inside of Megatron's layer is that of the Hugging Face model, and so are its rotations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_layer_workers import attention_inputs, core_attention
from megatron_layouts import LLAMA3_ROPE
from sharing_workers import stream_of
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from spurline_megatron_backend.core_attention import Rotary, packed_params

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6).map(sorted)
HEADS = st.sampled_from([(4, 4), (4, 2), (8, 2)])


def config_of(heads: int, key_heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        head_dim=8,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        attn_implementation="eager",
    )


def by_transformers(lengths: list[int], inputs: list[torch.Tensor], config: LlamaConfig) -> torch.Tensor:
    """Each segment alone through the attention layer of transformers, whose projections are identities here."""
    layer: Any = LlamaAttention(config, layer_idx=0)
    layer.o_proj = torch.nn.Identity()
    outputs = []
    for query, key, value in zip(*(part.split(lengths) for part in inputs), strict=True):
        flat = {name: part.flatten(1)[None] for name, part in (("q", query), ("k", key), ("v", value))}
        for name, part in flat.items():
            setattr(layer, f"{name}_proj", _Gives(part))
        length = len(query)
        states = torch.zeros(1, length, 1)
        rotation = LlamaRotaryEmbedding(config)(query, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf, dtype=query.dtype).triu(1)[None, None]
        outputs.append(layer(states, rotation, mask)[0][0])
    return torch.cat(outputs)


class _Gives(torch.nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.value


@settings(max_examples=40)
@given(lengths=LENGTHS, heads=HEADS, recompute=st.booleans())
def test_it_equals_the_attention_of_transformers_on_each_segment_alone(
    lengths: list[int], heads: tuple[int, int], recompute: bool
) -> None:
    stream = stream_of(lengths, [True] * sum(lengths))
    inputs = attention_inputs(sum(lengths), *heads)
    config = config_of(*heads)
    params = packed_params(stream, Rotary(config, torch.device("cpu"), torch.float32))
    output = core_attention(inputs, params, recompute=recompute)
    expected = by_transformers(lengths, inputs, config)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=2e-6)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    got = torch.autograd.grad(output, inputs, direction)
    wanted = torch.autograd.grad(expected, inputs, direction)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}

MODELS: list[Any] = [
    pytest.param(LlamaConfig(**SIZES, rope_parameters=DEFAULT), modeling_llama.LlamaRotaryEmbedding, id="llama"),
    pytest.param(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE), modeling_llama.LlamaRotaryEmbedding, id="llama3"),
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
    got = modeling_llama.apply_rotary_pos_emb(query[0], key[0], *rotation, unsqueeze_dim=1)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other[0].transpose(0, 1))
