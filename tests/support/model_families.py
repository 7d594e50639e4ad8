"""Families of causal language models, each as a tiny random one, and how Spurline reads it.

python tests/support/model_families.py     writes the table of docs/models.md, names the families that are not in it
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spurline_models.streams.stream_model import Reading

_SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_STATE_SPACE: dict[str, Any] = {"mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
_WINDOW: dict[str, Any] = {"sliding_window": 5}
_GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
_LATENT: dict[str, Any] = {
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
_SHARED_EXPERTS: dict[str, Any] = {
    **_EXPERTS,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Enough heads that no two keys have the same score, 0: which of them is chosen would depend on the length of a row.
_INDEXER: dict[str, Any] = {"index_n_heads": 64, "index_head_dim": 8, "index_topk": 4}
_PER_LAYER: dict[str, Any] = {
    **_WINDOW,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "global_head_dim": 8,
}
_SIGHT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Family:
    """model_type: of transformers. reading: where no kernels of other packages are installed. settings: of the tiny
    model. has: what the family has besides plain attention, for people. replays: whether its experts, where it has
    some, can be replayed."""

    model_type: str
    reading: Reading = "stream"
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    has: str = ""
    replays: bool = True


FAMILIES = (
    Family("llama"),
    Family("mistral", settings=_WINDOW, has="sliding windows"),
    Family("ministral", settings=_WINDOW, has="sliding windows"),
    Family("qwen2"),
    Family("qwen3"),
    Family("qwen3_moe", settings=_EXPERTS, has="experts"),
    Family("mixtral", settings=_EXPERTS, has="experts"),
    Family("deepseek_v3", settings=_EXPERTS | _LATENT, has="latent attention, experts"),
    Family("glm4"),
    Family("glm4_moe", settings=_SHARED_EXPERTS, has="experts"),
    Family("gemma"),
    Family("gemma2", "rows", _WINDOW | {"query_pre_attn_scalar": 8}, "softcaps of scores and logits, windows"),
    Family("gemma3_text", settings=_WINDOW | {"query_pre_attn_scalar": 8}, has="sliding windows"),
    Family("phi3"),
    Family("olmo2"),
    Family("olmo3", settings=_WINDOW, has="sliding windows"),
    Family("smollm3"),
    Family("granite", settings={"logits_scaling": 3.0}, has="a scale of logits"),
    Family("ernie4_5"),
    Family("hunyuan_v1_dense"),
    Family("gpt_neox"),
    Family("gpt2", settings=_GPT2),
    Family("seed_oss", settings={"residual_dropout": 0.0}),
    Family("gpt_oss", settings=_EXPERTS | _WINDOW, has="attention sinks, windows, experts"),
    Family(
        "cohere2",
        settings=_WINDOW | {"layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.25},
        has="a scale of logits, windows",
    ),
    Family(
        "llama4_text",
        "rows",
        _EXPERTS | {"num_hidden_layers": 4, "attention_chunk_size": 5, "intermediate_size_mlp": 48},
        has="chunked attention, experts; temperatures by the position in a row",
    ),
    Family(
        "lfm2",
        "rows",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        has="convolutions (causal_conv1d)",
    ),
    Family("qwen3_5_text", "rows", _DELTA, has="linear attention (flash-linear-attention)"),
    Family(
        "qwen3_next",
        "rows",
        _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
        has="linear attention (flash-linear-attention), experts",
    ),
    Family(
        "falcon_h1",
        "rows",
        _STATE_SPACE | {"mamba_d_ssm": 32, "mamba_n_heads": 4},
        has="state spaces (mamba_ssm, causal_conv1d)",
    ),
    Family(
        "bamba",
        "rows",
        _STATE_SPACE | {"mamba_n_heads": 8, "attn_layer_indices": [1]},
        has="state spaces (mamba_ssm, causal_conv1d)",
    ),
    Family("mamba", "rows", {"state_size": 8}, has="state spaces without attention (mamba_ssm, causal_conv1d)"),
    Family(
        "minimax",
        "rows",
        _EXPERTS | {"block_size": 4, "layer_types": ["linear_attention", "full_attention"]},
        has="linear attention, experts",
    ),
    Family("ministral3"),
    Family("exaone4", settings=_WINDOW, has="sliding windows"),
    Family("apertus"),
    Family("arcee"),
    Family("olmoe", settings=_EXPERTS, has="experts"),
    Family("glm4_moe_lite", settings=_EXPERTS | _LATENT, has="latent attention, experts"),
    Family("dots1", settings=_SHARED_EXPERTS, has="experts"),
    Family("hunyuan_v1_moe", settings=_EXPERTS, has="experts"),
    Family("ernie4_5_moe", settings={"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}, has="experts"),
    Family("minimax_m2", settings=_EXPERTS, has="experts"),
    Family(
        "mimo_v2_flash",
        settings=_SHARED_EXPERTS | _WINDOW | {"v_head_dim": 4, "swa_head_dim": 8, "swa_v_head_dim": 4},
        has="attention sinks, windows, experts",
    ),
    Family(
        "longcat_flash",
        settings=_EXPERTS
        | _LATENT
        | {"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2},
        has="latent attention, experts",
        replays=False,
    ),
    Family("vaultgemma", "rows", _WINDOW | {"query_pre_attn_scalar": 8}, "softcaps of scores and logits"),
    Family(
        "gemma3n_text",
        settings=_PER_LAYER
        | {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        has="keys and values of other layers, a softcap of logits, windows",
    ),
    Family("gemma4_text", settings=_PER_LAYER, has="inputs of layers, a softcap of logits, windows"),
    Family(
        "gemma3",
        settings={"text_config": _SHAPE | _WINDOW | {"query_pre_attn_scalar": 8}, "vision_config": _SIGHT},
        has="sliding windows; also sees images",
    ),
    Family(
        "gemma4",
        settings={"text_config": _SHAPE | _PER_LAYER, "vision_config": _SIGHT, "audio_config": None},
        has="inputs of layers, a softcap of logits, windows; also sees images",
    ),
    Family(
        "lfm2_moe",
        "rows",
        _EXPERTS | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
        has="convolutions (causal_conv1d), experts",
    ),
    Family(
        "qwen3_5_moe_text",
        "rows",
        _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
        has="linear attention (flash-linear-attention), experts",
    ),
    Family(
        "olmo_hybrid", "rows", {**_DELTA, "linear_num_key_heads": 4}, has="linear attention (flash-linear-attention)"
    ),
    Family(
        "granitemoehybrid",
        "rows",
        _EXPERTS
        | _STATE_SPACE
        | {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
        has="state spaces (mamba_ssm, causal_conv1d), experts",
    ),
    Family(
        "nemotron_h",
        "rows",
        _EXPERTS
        | {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 4,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
        has="state spaces (mamba_ssm, causal_conv1d), experts",
        replays=False,
    ),
    Family(
        "mamba2",
        "rows",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},
        has="state spaces without attention (mamba_ssm, causal_conv1d)",
    ),
    Family("deepseek_v32", "rows", _EXPERTS | _LATENT | _INDEXER, has="attention to chosen keys, experts"),
    Family("glm_moe_dsa", "rows", _EXPERTS | _LATENT | _INDEXER, "attention to chosen keys, experts"),
    Family("cohere", has="a scale of logits"),
    Family("cohere2_moe", settings=_EXPERTS | _WINDOW, has="a scale of logits, windows, experts"),
    Family("exaone_moe", settings=_SHARED_EXPERTS | _WINDOW, has="windows, experts"),
    Family("deepseek_v2", settings=_SHARED_EXPERTS | _LATENT | {"n_group": 1}, has="latent attention, experts"),
    Family("minicpm3", settings=_LATENT, has="latent attention"),
    Family("qwen2_moe", settings=_EXPERTS | {"shared_expert_intermediate_size": 16}, has="experts"),
    Family("granitemoe", settings=_EXPERTS, has="experts"),
    Family("flex_olmo", settings=_EXPERTS, has="experts"),
    Family("afmoe", settings=_EXPERTS | _WINDOW, has="windows, experts"),
    Family("solar_open", settings=_SHARED_EXPERTS, has="experts"),
    Family("hy_v3", settings=_EXPERTS, has="experts"),
    Family("glm"),
    Family("helium"),
    Family("internlm3"),
    Family("nanochat"),
    Family("olmo"),
    Family("phi"),
    Family("starcoder2", settings=_WINDOW | {"residual_dropout": 0.0}, has="sliding windows"),
    Family(
        "jamba",
        "rows",
        _EXPERTS | {"mamba_d_state": 8},
        "state spaces (mamba_ssm, causal_conv1d), experts",
        replays=False,
    ),
    Family("falcon_mamba", "rows", {"state_size": 8}, "state spaces without attention (mamba_ssm, causal_conv1d)"),
    Family("recurrent_gemma", "rows", {"attention_window_size": 5}, "linear recurrences, windows"),
    Family(
        "llama4",
        "rows",
        {
            "text_config": _SHAPE
            | _EXPERTS
            | {"num_hidden_layers": 4, "attention_chunk_size": 5, "intermediate_size_mlp": 48},
            "vision_config": _SIGHT,
        },
        "as llama4_text; the text alone of a model that also sees images",
    ),
    Family(
        "qwen3_5",
        "rows",
        {"text_config": _SHAPE | _DELTA, "vision_config": _SIGHT | {"depth": 1}},
        "as qwen3_5_text; the text alone of a model that also sees images",
    ),
    Family("nemotron", "rows", has="attention that is told nothing of segments"),
    Family("bloom", "rows", {"n_layer": 2, "n_head": 4}, has="attention that cannot be replaced"),
    Family("stablelm", "rows", has="attention that is told nothing of segments"),
)


def family_of(model_type: str) -> Family:
    return next(family for family in FAMILIES if family.model_type == model_type)


def tiny_model(family: Family) -> PreTrainedModel:
    """Make a model with random weights in fp32. Initial weights could hide a mistake."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **(_SHAPE | family.settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


def taken_gradients(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Return the gradients of all parameters, of those without one zeros, and clear them."""
    found = [
        (name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
        for name, parameter in model.named_parameters()
    ]
    model.zero_grad()
    return found


READ_AS: dict[Reading, str] = {"stream": "packed", "rows": "a row each"}


def table() -> str:
    """Markdown: which families are tested, and how they are read."""
    lines = ["| `model_type` | read as | has |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {f.model_type} | {READ_AS[f.reading]} | {f.has} |" for f in FAMILIES)])


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARKED = re.compile(r"(?<=<!-- families -->\n).*(?=\n<!-- end of families -->)", re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(MARKED.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    # transformers adds families all the time.
    untried = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {family.model_type for family in FAMILIES}
    print(f"causal language models that no test trains: {', '.join(sorted(untried))}")
