"""How long a sequence a model takes, as its config says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backend_batches import local_backend, write_model_folder
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, PretrainedConfig

from spurline.config.run_config import ModelConfig
from spurline_models.lengths import position_limit


def llama(positions: int, **rope: Any) -> PretrainedConfig:
    return LlamaConfig(max_position_embeddings=positions, rope_parameters={"rope_theta": 1e4, **rope})


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (llama(512, rope_type="default"), 512),
        (llama(512, rope_type="yarn", factor=4.0, original_max_position_embeddings=512), 2048),
        (llama(2048, rope_type="yarn", factor=4.0, original_max_position_embeddings=512), 2048),
        (llama(512, rope_type="linear", factor=2.0), 1024),
        (llama(512, rope_type="dynamic", factor=2.0), 1024),
        (
            llama(
                131072,
                rope_type="llama3",
                factor=8.0,
                original_max_position_embeddings=8192,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
            131072,
        ),
    ],
    ids=["default", "yarn", "yarn counted already", "linear", "dynamic", "llama3"],
)
def test_rope_scaling_counts(config: PretrainedConfig, tokens: int) -> None:
    limit = position_limit(config)
    assert limit is not None
    assert (limit.tokens, limit.extends) == (tokens, True)


def test_the_shortest_kind_of_layer_decides() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    limit = position_limit(Gemma3TextConfig(max_position_embeddings=1024, rope_parameters=rope))
    assert limit is not None
    assert limit.tokens == 1024


def test_a_learned_table_ends_where_it_ends() -> None:
    limit = position_limit(GPT2Config(n_positions=1024))
    assert limit is not None
    assert (limit.tokens, limit.extends) == (1024, False)


def test_an_engine_that_borrows_the_model_keeps_its_scaled_limit(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}
    folder = write_model_folder(tmp_path / "model", rope_parameters=rope)
    assert local_backend(folder).generation_model().max_tokens == 1024
    insisting = {"model": ModelConfig(path=str(folder), init="random", allow_extrapolation=True)}
    assert local_backend(folder, run=insisting).generation_model().max_tokens is None
