"""Fixtures of core's tests, which find no plugin installed, whatever this environment has."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
from bare_components import entry_points, metadata_with


@pytest.fixture(autouse=True, scope="module")
def nothing_installed() -> Iterator[None]:
    """No plugin and no command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", metadata_with(lambda _: []))
        yield


@pytest.fixture
def bare(nothing_installed: None) -> Iterator[None]:
    """`bare_components` as the only plugin, which is loaded by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", metadata_with(entry_points))
        yield


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A text file to train on: 24 lines of different lengths."""
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {number} {'abc' * (number % 5)}\n" for number in range(24)), encoding="utf-8")
    return path
