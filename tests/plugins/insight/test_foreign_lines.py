"""metrics.jsonl as a report reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spurline_insight.report.record import read_record

FOREIGN = ['{"step": 2, "loss": "low"}', '{"loss": 1.0}', '{"step": true}', "[2]", "step 2: loss 0.5"]


@pytest.mark.parametrize("line", FOREIGN)
def test_a_line_of_others_is_left_out_of_the_report_with_a_word(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    assert read_record(tmp_path).series("step") == ([1, 3], [1.0, 3.0])
    assert "metrics.jsonl:2" in capsys.readouterr().err
