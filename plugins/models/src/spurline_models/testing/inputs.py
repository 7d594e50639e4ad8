"""Write tiny models and their tokenizer for contract tests. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spurline.testing.samples import VOCABULARY
from spurline_text.testing.inputs import tiny_tokenizer


def write_tiny_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a two-layer Qwen3 with random weights and norms, and a byte-level tokenizer with a ChatML template.

    `overrides` are fields of Qwen3Config. Returns the folder, which `from_pretrained` loads.
    """
    from transformers import Qwen3Config

    return write_model(folder, Qwen3Config, overrides, seed=seed)


def write_tiny_moe_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny Qwen3-MoE with 8 experts per layer. Each token uses 2 experts. `overrides` are config fields."""
    from transformers import Qwen3MoeConfig

    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    return write_model(folder, Qwen3MoeConfig, experts | overrides, seed=seed)


def write_model(folder: Path, config: type[Any], overrides: dict[str, Any], *, seed: int = 0) -> Path:
    """Write a tiny model of any config class of transformers. Fields that are None keep the default of that class."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": max(VOCABULARY, len(tokenizer)),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **overrides,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(**fields), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # New norms are all ones and new biases are all zeros. That would hide mistakes.
                is_constant = "norm" in name or name.endswith("bias")
                parameter.add_(0.1 * torch.randn_like(parameter)) if is_constant else parameter.mul_(4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
