"""Fixtures for tests of plugins. pytest loads them if this package is installed."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def spurline_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer Qwen3 with random weights and a byte-level chat tokenizer."""
    from spurline_models.testing.inputs import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("spurline-tiny-model"))
