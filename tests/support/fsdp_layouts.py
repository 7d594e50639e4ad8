"""Settings of the backend `fsdp` for tests: so many ranks on CPU, in one layout or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

LONG = (200, 3, 240, 64)
"""Lengths of rows at whose ends positions are large: what rounds their angles shows there."""


def on(ranks: int, **settings: Any) -> dict[str, Any]:
    """A section `backend`; ranks that wait for each other end the test within a minute."""
    limits = {"start_timeout_s": 120, "call_timeout_s": 60, "collective_timeout_s": 60}
    return {"name": "fsdp", "device": "cpu", "ranks": ranks, "num_threads": 1, **limits, **settings}


def in_bf16(model: Path) -> Path:
    """The same model, whose files hold bf16 from now on."""
    for file in model.glob("*.safetensors"):
        save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    return model
