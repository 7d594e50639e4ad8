"""A run small enough to repeat: a two-layer model on 64 chat rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from spurline.cli import main


@pytest.fixture
def base_config(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> dict[str, Any]:
    """A valid config of a six-step run."""
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "max_length": 128},
        "batch_size": 8,
        "steps": 6,
        "optimizer": {"learning_rate": 1e-3},
        "collator": {"name": "packed", "max_tokens": 256},
        "checkpoint": {"every_steps": 2},
        "backend": {"name": "local", "device": "cpu", "num_threads": 1},
    }


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Write a config as YAML; returns its path."""

    def write(config: dict[str, Any]) -> Path:
        path = tmp_path / "run.yaml"
        YAML(typ="safe", pure=True).dump(config, path)
        return path

    return write


@pytest.fixture
def spurline(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as raised:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return int(raised.value.code or 0), output.out, output.err

    return run
