"""Settings of the backend `megatron` for tests, and tiny models of the families that it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spurline_models.testing.inputs import write_model, write_tiny_model, write_tiny_moe_model

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def on(ranks: int, **settings: Any) -> dict[str, Any]:
    """Return a section `backend` whose time limits end a test that hangs within minutes."""
    limits = {"start_timeout_s": 120, "call_timeout_s": 60, "collective_timeout_s": 60}
    return {"name": "megatron", "device": "cpu", "ranks": ranks, "num_threads": 1, **limits, **settings}


write_qwen3, write_qwen3_moe = write_tiny_model, write_tiny_moe_model
"""Write a model with norms of queries and keys, the second with experts in every layer, which two or four ranks can
divide."""


def write_qwen25(folder: Path, **overrides: Any) -> Path:
    """Write a model with biases of queries, keys and values, whose padding token is in rows of the contract."""
    from transformers import Qwen2Config

    # Its config has no width of a head.
    return write_model(folder, Qwen2Config, {"head_dim": None, "pad_token_id": 5, **overrides})


def write_llama3(folder: Path, **overrides: Any) -> Path:
    """Write a model whose rotary embeddings are scaled for long sequences."""
    from transformers import LlamaConfig

    return write_model(folder, LlamaConfig, {"rope_parameters": LLAMA3_ROPE, **overrides})
