"""Folders for temporary files: those whose owners were killed go, all others stay."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from spurline_text.own_folder import OwnFolder

PREFIX = "spurline-test-"


def test_a_folder_whose_owner_is_gone_is_removed_by_the_next_and_one_in_use_is_not(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "slice-0").write_bytes(b"tokens")
    first = OwnFolder(PREFIX, tmp_path)
    assert not left.exists()
    second = OwnFolder(PREFIX, tmp_path)
    assert first.path.is_dir()
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.remove()
    second.remove()
    assert not [*tmp_path.iterdir()]


def test_a_link_and_a_file_of_that_name_are_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(precious)
    (tmp_path / f"{PREFIX}file").touch()
    OwnFolder(PREFIX, tmp_path).remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", f"{PREFIX}file", f"{PREFIX}link"]
    assert (precious / "thesis").exists()


def test_storage_without_locks_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / f"{PREFIX}other").mkdir()
    OwnFolder(PREFIX, tmp_path).remove()
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}other"], "it may be in use"


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def flock(file: int, operation: int) -> None:
        made.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        if len(made) == 1:
            made[0].rmdir()

    monkeypatch.setattr(fcntl, "flock", flock)
    owner = OwnFolder(PREFIX, tmp_path)
    assert owner.path == made[-1] != made[0]
    owner.remove()
