"""Whole runs of models beyond plain attention: linear attention, attention sinks, experts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES
from run_helpers import assert_same_weights, deterministic, read_metrics
from transformers import AutoConfig

from spurline import Run, load_config
from spurline.testing.inputs import write_model

FAMILY_NAMES = ("qwen3_5_text", "gpt_oss", "mixtral")


def write_family(folder: Path, name: str) -> Path:
    """The tiny model of a family, with a tokenizer that has a chat template."""
    family = next(family for family in FAMILIES if family.model_type == name)
    return write_model(folder, type(AutoConfig.for_model(name)), {"head_dim": 8, **family.settings})


def train(config: dict[str, Any], name: str, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    run_dir = Path(f"{config['run_dir']}-{name}")
    Run(load_config(config | changes | {"run_dir": str(run_dir)})).train()
    return run_dir, deterministic(read_metrics(run_dir))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_supervised_runs_resume_bit_for_bit_and_padded_rows_are_packed_ones(
    base_config: dict[str, Any], tmp_path: Path, name: str
) -> None:
    model = {"path": str(write_family(tmp_path / name, name))}
    config = base_config | {"model": model, "steps": 4, "schedule": "constant"}
    whole, lines = train(config, "whole")
    for steps in (2, 4):
        pieces, resumed = train(config, "pieces", steps=steps)
    assert resumed == lines
    assert_same_weights(pieces, whole)
    _, padded = train(config, "padded", collator="padded")
    for one, other in zip(lines, padded, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", FAMILY_NAMES if os.environ.get("SPURLINE_SOAK") else ("mixtral",))
def test_reinforcement_learning_without_staleness_equals_the_synchronous_run(
    rl_config: dict[str, Any], tmp_path: Path, name: str
) -> None:
    rl_config["model"] = {"path": str(write_family(tmp_path / name, name))}
    synchronous, lines = train(rl_config, "synchronous", steps=3)
    source = rl_config["source"] | {"name": "async_rollouts", "max_staleness": 0}
    stale_free, found = train(rl_config, "asynchronous", steps=3, source=source, plugins=["async_rl"])
    for one, other in zip(found, lines, strict=True):
        assert {key: one[key] for key in other} == other
        assert one["grad_norm"] > 0
        assert one["mismatch/logprob_diff/max"] < 1e-4
    assert_same_weights(stale_free, synchronous)
