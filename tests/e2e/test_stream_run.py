"""Training on a stream through the loop: it learns, plans, resumes exactly, and evaluates on data that is held."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import Config, Spurline, assert_same_run, train, write_rows


@pytest.fixture
def stream_config(base_config: Config, tmp_path: Path) -> Config:
    texts = [{"text": f"number {number} is followed by {number + 1}"} for number in range(60)]
    rows = write_rows(tmp_path / "texts.jsonl", texts)
    return {
        **base_config,
        "source": {"name": "stream", "buffer_rows": 20},
        "data": {"train": {"name": "hf_stream", "path": str(rows)}, "eval": str(rows), "max_length": 64},
        "schedule": "constant",
        "steps": 10,
    }


def test_a_stream_is_learned_from_and_a_cut_run_equals_the_uninterrupted_one(stream_config: Config) -> None:
    whole = train(stream_config)
    assert whole.lines[-1]["loss"] < whole.lines[0]["loss"]
    assert whole.lines[-1]["epoch"] == 1.0
    train(stream_config, name="cut", stop_after=4)
    assert_same_run(train(stream_config, name="cut"), whole)


def test_plan_shows_the_first_batches_of_a_stream(stream_config: Config, spurline: Spurline) -> None:
    code, out, _ = spurline("plan", stream_config)
    assert code == 0
    assert "read as a stream; these are the first 20 samples" in out
    assert "step 3: " in out
