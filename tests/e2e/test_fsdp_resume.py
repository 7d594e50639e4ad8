"""A run on several ranks that finds its newest checkpoint damaged names the one before."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from run_helpers import on_ranks

from spurline import Run, load_config
from spurline.errors import CheckpointError

pytestmark = pytest.mark.processes


def test_a_damaged_piece_is_named_with_the_newest_good_checkpoint(base_config: dict[str, Any]) -> None:
    config = on_ranks(base_config | {"steps": 4})
    Run(load_config(config)).train()
    checkpoints = Path(config["run_dir"]) / "checkpoints"
    piece = checkpoints / "step-00000004" / "backend" / "policy" / "rank-00001.part-000.safetensors"
    content = piece.read_bytes()
    piece.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    good = re.escape(str(checkpoints / "step-00000002"))
    with pytest.raises(CheckpointError, match=rf"rank-00001.*content has changed.*step 2: use `--resume {good}`"):
        Run(load_config(config | {"steps": 6})).train()
    # No time is spent on reading where the settings say that sizes are enough.
    trusting = config | {"steps": 6, "checkpoint": {"every_steps": 2, "verify": "sizes"}}
    assert Run(load_config(trusting)).train().status == "finished"


def test_a_checkpoint_of_ranks_is_not_read_by_another_backend_and_the_way_out_is_named(
    base_config: dict[str, Any],
) -> None:
    config = on_ranks(base_config | {"steps": 2})
    Run(load_config(config)).train()
    with pytest.raises(CheckpointError) as refused:
        Run(load_config(config | {"backend": {"name": "local", "device": "cpu"}})).train()
    text = str(refused.value)
    assert "A checkpoint is read by the backend that wrote it" in text
    assert "other data" not in text
    assert "`spurline export`, then model.path" in text
