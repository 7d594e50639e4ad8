"""A tracker of the plugin comes after those of core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spurline import load_config
from spurline.run.build import build_trackers


@pytest.mark.parametrize("listed", [["tensorboard"], ["tensorboard", "console", "jsonl"]])
def test_the_metrics_file_is_cut_back_before_the_terminal_reads_it(
    listed: list[str], spurline_tiny_model: Path, spurline_chat_file: Path
) -> None:
    pytest.importorskip("tensorboard")
    config: dict[str, Any] = {
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file)},
        "steps": 1,
        "trackers": listed,
    }
    assert list(build_trackers(load_config(config))) == ["jsonl", "console", "tensorboard"]
