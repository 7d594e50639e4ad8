"""Tiny models of every family that the megatron backend trains, and the ranks of a grid, simulated in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_layouts
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import HeldParameter, held_parameters

LLAMA3_ROPE = megatron_layouts.LLAMA3_ROPE | {"original_max_position_embeddings": 16}

_SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}

FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2Config, _SIZES),
    "qwen3": (Qwen3Config, _SIZES | {"head_dim": 6}),
    "qwen3_moe": (Qwen3MoeConfig, _SIZES | _EXPERTS | {"head_dim": 6}),
}
"""Model type -> (class of its config, fields of a tiny one). Vocabularies are not multiples of anything."""


def tiny_config(family: str, **fields: Any) -> PretrainedConfig:
    kind, own = FAMILIES[family]
    return kind(**(own | fields))


def tiny_causal(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose values all differ from each other, norms and biases too."""
    torch.manual_seed(seed)
    causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in causal.parameters():
            parameter.normal_()
    return causal


def write_model(folder: Path, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """A folder with the files of a tiny model; returns the model. options: of `save_pretrained`."""
    causal = tiny_causal(config)
    causal.save_pretrained(folder, **options)
    return causal


def ranks_of(
    architecture: Architecture, grid: Grid, *, critic: bool = False, dtype: torch.dtype = torch.float32
) -> list[list[tuple[HeldParameter, Tensor]]]:
    """The parameters of every rank, full of NaN."""
    return [
        [
            (parameter, torch.full(parameter.shape, torch.nan, dtype=dtype))
            for part in held_parameters(architecture, grid, grid.place(rank), critic=critic)
            for parameter in part.values()
        ]
        for rank in range(grid.ranks)
    ]


def joined(ranks: list[list[tuple[HeldParameter, Tensor]]]) -> dict[str, Tensor]:
    """Join the parameters of all ranks to whole tensors. Copies of a value must be equal."""
    tensors: dict[str, Tensor] = {}
    for parameter, values in (pair for held in ranks for pair in held):
        flat = values.reshape(-1)
        for part in parameter.parts:
            whole = tensors.setdefault(part.name, values.new_full(part.shape, torch.nan))
            there = whole[tuple(map(slice, part.box.offset, part.box.end))]
            here = flat[part.begin : part.end].view(part.box.shape)
            assert torch.equal(there.isnan() | (there == here), torch.ones_like(here, dtype=torch.bool)), part
            there.copy_(here)
    for name, tensor in tensors.items():
        assert not tensor.isnan().any(), name
    return tensors


@st.composite
def grids(draw: st.DrawFn, architecture: Architecture) -> Grid:
    """Draw a grid that divides this architecture."""

    def divisor(*numbers: int) -> int:
        return draw(st.sampled_from([size for size in (1, 2, 4) if all(number % size == 0 for number in numbers)]))

    tensor = divisor(architecture.heads, architecture.key_value_heads, architecture.ffn)
    stages = [(p, v) for p in (1, 2, 3) for v in (1, 2) if p * v <= architecture.num_layers and (v == 1 or p > 1)]
    pipeline, virtual = draw(st.sampled_from(stages))
    context = draw(st.sampled_from([1, 2]))
    data = draw(st.sampled_from([1, 2, 3]))
    expert = expert_tensor = 1
    if architecture.num_experts:
        room = tensor * context * data
        expert = draw(st.sampled_from([e for e in (1, 2, 4) if architecture.num_experts % e == 0 and room % e == 0]))
        widths = [t for t in (1, 2) if architecture.expert_ffn % t == 0 and room % (expert * t) == 0]
        expert_tensor = draw(st.sampled_from(widths))
    return Grid(tensor * context * data * pipeline, tensor, pipeline, virtual, context, expert, expert_tensor)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = draw(st.sampled_from([0, 0, 2, 4, 8]))
    return Architecture(
        model_type="any",
        num_layers=draw(st.integers(1, 7)),
        hidden=draw(st.integers(1, 5)),
        ffn=4 * draw(st.integers(1, 3)),
        heads=groups * draw(st.integers(1, 3)),
        key_value_heads=groups,
        head_dim=2 * draw(st.integers(1, 3)),
        vocabulary=draw(st.integers(2, 11)),
        tied=draw(st.booleans()),
        norm_epsilon=1e-6,
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        num_experts=experts,
        experts_per_token=min(experts, 2),
        expert_ffn=2 * draw(st.integers(1, 3)) if experts else 0,
    )


@st.composite
def divided(draw: st.DrawFn) -> tuple[Architecture, Grid]:
    architecture = draw(architectures())
    return architecture, draw(grids(architecture))
