"""Reading a run directory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from spurline.errors import RunDirectoryError
from spurline_insight.report.record import read_record


def test_a_finished_run_is_read_whole(make_run_dir: Callable[..., Path]) -> None:
    record = read_record(str(make_run_dir(num_steps=12)))
    assert record.series("loss")[0] == list(range(1, 13))
    assert record.series("eval/loss")[0] == [10, 12]
    assert record.config["model"]["path"] == "models/tiny"
    assert record.summary["status"] == "finished"


def test_a_run_in_progress_is_read_up_to_its_last_complete_step(make_run_dir: Callable[..., Path]) -> None:
    run_dir = make_run_dir(num_steps=3)
    with (run_dir / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 4, "loss": 0.')
    (run_dir / "summary.json").unlink()
    record = read_record(run_dir)
    assert len(record.metrics) == 3
    assert record.summary == {}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="nowhere: no such folder"):
        read_record(tmp_path / "nowhere")


def test_a_folder_that_is_no_run_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(RunDirectoryError, match=r"not a run directory.*notes\.txt"):
        read_record(tmp_path)


def test_a_folder_of_runs_is_answered_with_the_runs_in_it(make_run_dir: Callable[..., Path]) -> None:
    run_dir = make_run_dir()
    (run_dir.parent / "notes").mkdir(exist_ok=True)
    with pytest.raises(RunDirectoryError, match=rf"Runs in it: {re.escape(str(run_dir))}\.$"):
        read_record(run_dir.parent)


@pytest.mark.parametrize("content", ['{"a": ', "[1, 2]"])
def test_a_broken_summary_is_named(make_run_dir: Callable[..., Path], content: str) -> None:
    run_dir = make_run_dir()
    (run_dir / "summary.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=r"summary\.json"):
        read_record(run_dir)
