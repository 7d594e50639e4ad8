"""What is built, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spurline import load_config
from spurline.run.build import build_trackers


@pytest.mark.parametrize("listed", [[], ["jsonl"], ["console"], ["noted", "console", "jsonl"]])
def test_the_metrics_file_is_cut_back_before_the_terminal_reads_it(bare: None, listed: list[str], lines: Path) -> None:
    config: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": str(lines)}, "steps": 1, "trackers": listed}
    made = list(build_trackers(load_config(config)))
    assert made[:2] == ["jsonl", "console"]
    assert made[2:] == ["noted"] * ("noted" in listed)
