"""Training on a stream through the loop: it learns, plans, resumes exactly, and evaluates on data that is held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_helpers import Config, Spurline, assert_same_weights, deterministic, read_metrics, train


@pytest.fixture
def stream_config(base_config: Config, tmp_path: Path) -> Config:
    rows = tmp_path / "texts.jsonl"
    texts = [f"number {number} is followed by {number + 1}" for number in range(60)]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return {
        **base_config,
        "source": {"name": "stream", "buffer_rows": 20},
        "data": {"train": {"name": "hf_stream", "path": str(rows)}, "eval": str(rows), "max_length": 64},
        "schedule": "constant",
        "steps": 10,
    }


def test_a_stream_is_learned_from_and_a_cut_run_equals_the_uninterrupted_one(
    stream_config: Config, tmp_path: Path
) -> None:
    train(stream_config)
    whole = read_metrics(stream_config["run_dir"])
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert whole[-1]["epoch"] == 1.0
    cut = {**stream_config, "run_dir": str(tmp_path / "cut")}
    train({**cut, "steps": 4})
    train(cut)
    resumed = read_metrics(cut["run_dir"])

    def of_training(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Without what the shorter run evaluated at its own end."""
        return [{name: value for name, value in line.items() if "eval/" not in name} for line in deterministic(lines)]

    assert of_training(resumed) == of_training(whole)
    assert_same_weights(Path(stream_config["run_dir"]), Path(cut["run_dir"]))


def test_plan_shows_the_first_batches_of_a_stream(stream_config: Config, spurline: Spurline) -> None:
    code, out, _ = spurline("plan", stream_config)
    assert code == 0
    assert "read as a stream; these are the first 20 samples" in out
    assert "step 3: " in out
