"""From which size on batches are written past the caches, on machines that tell of their caches and on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from spurline_collation_fast.processor_caches import last_level_bytes


@pytest.fixture
def told(tmp_path: Path) -> Path:
    for number, (level, size) in enumerate([("1", "32K"), ("2", "1024K"), ("3", "98304K")]):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    return tmp_path


def test_the_last_level_is_what_the_system_says(told: Path) -> None:
    assert last_level_bytes(told) == 96 << 20


@pytest.mark.parametrize("size", ["2M", "2048K", str(2 << 20)])
def test_sizes_have_units_or_none(told: Path, size: str) -> None:
    (told / "index2" / "size").write_text(size)
    assert last_level_bytes(told) == 2 << 20


@pytest.mark.parametrize("broken", ["level", "size"])
def test_a_machine_that_does_not_tell_has_what_servers_have(told: Path, tmp_path: Path, broken: str) -> None:
    (told / "index2" / broken).write_text("unknown")
    assert last_level_bytes(told) == 32 << 20
    assert last_level_bytes(tmp_path / "nowhere") == 32 << 20
