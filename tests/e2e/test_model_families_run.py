"""Whole runs of models beyond plain attention: linear attention, attention sinks, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES
from run_helpers import assert_same_weights, deterministic, read_metrics
from transformers import AutoConfig

from spurline import Run, load_config
from spurline_models.testing.inputs import write_model

FAMILY_NAMES = ("qwen3_5_text", "gpt_oss", "mixtral")
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def write_family(folder: Path, name: str) -> Path:
    """The tiny model of a family, with a tokenizer that has a chat template."""
    family = next(family for family in FAMILIES if family.model_type == name)
    layers = TWO_LAYERS if name == "qwen3_5_text" else {}
    return write_model(folder, type(AutoConfig.for_model(name)), {"head_dim": 8, **family.settings, **layers})


@pytest.fixture(autouse=True)
def few_rows(base_config: dict[str, Any], tmp_path: Path) -> None:
    """Reading all of them takes longer than training on some."""
    few = tmp_path / "few.jsonl"
    lines = Path(base_config["data"]["train"]).read_text(encoding="utf-8").splitlines(keepends=True)
    few.write_text("".join(lines[:16]), encoding="utf-8")
    base_config["data"]["train"] = str(few)


def train(config: dict[str, Any], name: str, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    run_dir = Path(f"{config['run_dir']}-{name}")
    Run(load_config(config | changes | {"run_dir": str(run_dir)})).train()
    return run_dir, deterministic(read_metrics(run_dir))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_supervised_runs_resume_bit_for_bit_and_padded_rows_are_packed_ones(
    base_config: dict[str, Any], tmp_path: Path, name: str
) -> None:
    model = {"path": str(write_family(tmp_path / name, name))}
    often = {"every_steps": 1}
    config = base_config | {"model": model, "steps": 2, "batch_size": 4, "checkpoint": often, "schedule": "constant"}
    whole, lines = train(config, "whole")
    for steps in (1, 2):
        pieces, resumed = train(config, "pieces", steps=steps)
    assert resumed == lines
    assert_same_weights(pieces, whole)
    _, padded = train(config, "padded", collator="padded", steps=1)
    assert lines[0]["loss"] == pytest.approx(padded[0]["loss"], rel=1e-5)
    assert lines[0]["grad_norm"] == pytest.approx(padded[0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_reinforcement_learning_without_staleness_equals_the_synchronous_run_also_in_pieces_and_however_cut(
    rl_config: dict[str, Any], tmp_path: Path, name: str
) -> None:
    rl_config["model"] = {"path": str(write_family(tmp_path / name, name))}
    rl_config["checkpoint"] = {"every_steps": 1}
    rl_config["minibatches"] = {"name": "by_prompt", "prompts_per_minibatch": 1}
    source = rl_config["source"] | {"prompts_per_step": 2, "samples_per_prompt": 3, "sampling": {"max_new_tokens": 5}}
    synchronous, lines = train(rl_config, "synchronous", steps=2, source=source)
    stale_free = {"source": source | {"name": "async_rollouts", "max_staleness": 0}, "plugins": ["async_rl"]}
    for steps in (1, 2):
        pieces, found = train(rl_config, "asynchronous", steps=steps, **stale_free)
    for one, other in zip(found, lines, strict=True):
        assert {key: one[key] for key in other} == other
        assert one["grad_norm"] > 0
        assert one["mismatch/logprob_diff/max"] < 1e-4
    assert_same_weights(pieces, synchronous)
    # Rows of rollouts are padded; here each is computed by itself.
    alone = rl_config["backend"] | {"rows_per_microbatch": 1}
    _, cut = train(rl_config, "cut", steps=1, source=source, backend=alone)
    for key in ("loss", "grad_norm", "reward/mean"):
        assert cut[0][key] == pytest.approx(lines[0][key], rel=1e-4, abs=1e-6), key
