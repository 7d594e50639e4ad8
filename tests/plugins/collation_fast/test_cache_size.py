"""The size of the last level cache, from files that may say nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spurline_collation_fast.cache_size import DEFAULT_BYTES, last_level_bytes


def write_sizes(folder: Path, *sizes: str) -> Path:
    for number, size in enumerate(sizes):
        (folder / f"index{number}").mkdir()
        (folder / f"index{number}" / "size").write_text(f"{size}\n")
    return folder


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    assert last_level_bytes(write_sizes(tmp_path, "32K", "1024K", "96M", "32K")) == 96 << 20


@pytest.mark.parametrize("sizes", [(), ("", "unknown"), ("0K",)])
def test_where_no_file_tells_the_system_is_asked_and_else_a_default_holds(
    sizes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_sizes(tmp_path, *sizes)
    monkeypatch.setattr(os, "sysconf", lambda name: 7 << 20)
    assert last_level_bytes(folder) == 7 << 20
    last_level_bytes.cache_clear()
    monkeypatch.setattr(os, "sysconf", lambda name: -1)
    assert last_level_bytes(folder) == DEFAULT_BYTES
    last_level_bytes.cache_clear()
    monkeypatch.delattr(os, "sysconf")
    assert last_level_bytes(folder) == DEFAULT_BYTES
