"""Whole runs of models beyond plain attention: linear attention, and attention sinks with experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from async_runs import assert_equals_synchronous, asynchronous
from model_families import FAMILIES
from run_helpers import Config, assert_same_run, read_metrics, train
from transformers import AutoConfig

from spurline_models.testing.inputs import write_model

FAMILY_NAMES = ("qwen3_5_text", "gpt_oss")
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def write_family(folder: Path, name: str) -> Path:
    """The tiny model of a family, with a tokenizer that has a chat template."""
    family = next(family for family in FAMILIES if family.model_type == name)
    layers = TWO_LAYERS if name == "qwen3_5_text" else {}
    return write_model(folder, type(AutoConfig.for_model(name)), {"head_dim": 8, **family.settings, **layers})


@pytest.fixture(autouse=True)
def few_rows(base_config: Config, tmp_path: Path) -> None:
    """Train on few rows, since reading all takes longer than training."""
    few = tmp_path / "few.jsonl"
    lines = Path(base_config["data"]["train"]).read_text(encoding="utf-8").splitlines(keepends=True)
    few.write_text("".join(lines[:16]), encoding="utf-8")
    base_config["data"]["train"] = str(few)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_supervised_runs_resume_bit_for_bit_and_padded_rows_are_packed_ones(
    base_config: Config, tmp_path: Path, name: str
) -> None:
    base_config["model"] = {"path": str(write_family(tmp_path / name, name))}
    base_config |= {"steps": 2, "batch_size": 4, "checkpoint": {"every_steps": 1}, "schedule": "constant"}
    whole = train(base_config, name="whole")
    train(base_config, steps=1)
    assert_same_run(train(base_config), whole)
    padded = train(base_config, name="padded", collator="padded", steps=1).lines[0]
    assert whole.lines[0]["loss"] == pytest.approx(padded["loss"], rel=1e-5)
    assert whole.lines[0]["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_reinforcement_learning_without_staleness_equals_the_synchronous_run_also_in_pieces_and_however_cut(
    rl_config: Config, tmp_path: Path, name: str
) -> None:
    rl_config["model"] = {"path": str(write_family(tmp_path / name, name))}
    rl_config |= {"steps": 2, "checkpoint": {"every_steps": 1}}
    rl_config["minibatches"] = {"name": "by_prompt", "prompts_per_minibatch": 1}
    rl_config["source"] |= {"prompts_per_step": 2, "samples_per_prompt": 3, "sampling": {"max_new_tokens": 5}}
    config = asynchronous(rl_config, max_staleness=0)
    train(config, steps=1)
    for line in assert_equals_synchronous(config).lines:
        assert line["grad_norm"] > 0
        assert line["mismatch/logprob_diff/max"] < 1e-4
    # Rows of rollouts are padded. Here each row is computed alone.
    alone = rl_config["backend"] | {"rows_per_microbatch": 1}
    cut, whole = train(rl_config, name="cut", steps=1, backend=alone).lines[0], read_metrics(config["run_dir"])[0]
    for key in ("loss", "grad_norm", "reward/mean"):
        assert cut[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key
