"""Settings of the backend `fsdp` for tests: a number of ranks on CPU, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

LONG = (200, 3, 240, 64)
"""Lengths of rows at whose ends positions are large: what rounds their angles shows there."""


def on(ranks: int, **settings: Any) -> dict[str, Any]:
    """Return a section `backend` whose time limits end a test that hangs within minutes."""
    limits = {"start_timeout_s": 120, "call_timeout_s": 60, "collective_timeout_s": 60}
    return {"name": "fsdp", "device": "cpu", "ranks": ranks, "num_threads": 1, **limits, **settings}


def in_bf16(model: Path) -> Path:
    """Rewrite the files of a model in bf16."""
    for file in model.glob("*.safetensors"):
        save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    return model
