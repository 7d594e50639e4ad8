"""Greedy generation equals picking the best token again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backend_batches import (
    PROMPTS,
    cross_entropy,
    excite,
    greedy_without_cache,
    lay_out,
    local_backend,
    make_samples,
    write_model_folder,
)
from model_families import family_of, tiny_model

from spurline.config.run_config import DataConfig
from spurline_models.generation import generate_greedily
from spurline_models.streams.stream_model import StreamModel
from spurline_text.configs import HfDatasetConfig

MORE_PROMPTS = [*PROMPTS, [40, 41, 42], list(range(50, 70))]


def test_generation_equals_a_greedy_loop_without_a_cache(tmp_path: Path) -> None:
    backend = excite(local_backend(write_model_folder(tmp_path / "model")))
    expected = [greedy_without_cache(backend._model.causal, prompt, 12, [3]) for prompt in PROMPTS]
    assert backend.generate(PROMPTS, max_new_tokens=12) == expected


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "mamba", "minimax", "llama4_text"])
def test_generation_is_exact_for_models_that_cannot_leave_padding_out_and_for_those_that_sdpa_does_not_know(
    name: str,
) -> None:
    family = family_of(name)
    model = StreamModel(tiny_model(family))
    model.read_as(family.reading)
    expected = [greedy_without_cache(model.causal, prompt, 12) for prompt in MORE_PROMPTS]
    assert generate_greedily(model, MORE_PROMPTS, 12, ()) == expected


def test_generation_stops_after_the_end_of_sequence_token(tmp_path: Path) -> None:
    free = excite(local_backend(write_model_folder(tmp_path / "model"))).generate(PROMPTS, max_new_tokens=12)
    stop = free[0][3]
    backend = excite(local_backend(write_model_folder(tmp_path / "model", eos_token_id=[3, stop])))
    responses = backend.generate(PROMPTS, max_new_tokens=12)
    assert responses[0] == free[0][: free[0].index(stop) + 1]
    for response, unbounded in zip(responses, free, strict=True):
        end = unbounded.index(stop) + 1 if stop in unbounded else len(unbounded)
        assert response == unbounded[:end]


def test_generation_leaves_training_as_it_was(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", attention_dropout=0.2)
    batch, objective = lay_out(make_samples([9, 12])), cross_entropy(5.0)
    expected = local_backend(folder).update(batch, objective)["loss"]
    backend = local_backend(folder)
    assert backend.generate([], max_new_tokens=3) == []
    backend.generate(PROMPTS, max_new_tokens=3)
    assert backend._model.causal.training
    assert backend._model.causal.config._attn_implementation == "spurline_segments"
    assert backend.update(batch, objective)["loss"] == expected


@pytest.mark.parametrize("changes", [{}, {"model_type": "gemma3_text", "architectures": None}])
def test_generation_beyond_the_trained_length_leaves_rotary_tables_as_they_were(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    rope = {"full_attention": dynamic, "sliding_attention": dynamic} if changes else dynamic
    folder = write_model_folder(tmp_path / "model", max_position_embeddings=16, rope_parameters=rope, **changes)
    data = DataConfig(train=(HfDatasetConfig(path="unused.jsonl"),), max_length=16)
    # As long as allowed: transformers by itself resets the tables only for samples that are shorter.
    batch, objective = lay_out(make_samples([9, 16])), cross_entropy(5.0)
    expected = local_backend(folder, run={"data": data}).update(batch, objective)["loss"]
    backend = local_backend(folder, run={"data": data})
    backend.generate(PROMPTS, max_new_tokens=40)
    assert backend.update(batch, objective)["loss"] == expected


def test_sampling_defaults_that_ship_with_a_model_do_not_apply(tmp_path: Path) -> None:
    backend = excite(local_backend(write_model_folder(tmp_path / "model")))
    expected = backend.generate(PROMPTS, max_new_tokens=8)
    defaults = backend._model.causal.generation_config
    defaults.do_sample, defaults.temperature, defaults.repetition_penalty = True, 5.0, 3.0
    assert backend.generate(PROMPTS, max_new_tokens=8) == expected
    assert backend._model.causal.generation_config is defaults
