"""Folders for temporary files: those whose owners were killed go, all others stay."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from spurline_collation_fast.tokenization import work_folder
from spurline_collation_fast.tokenization.work_folder import PREFIX, WorkFolder


def test_a_folder_whose_owner_is_gone_is_removed_by_the_next_and_one_in_use_is_not(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "slice-0").write_bytes(b"tokens")
    first = WorkFolder(tmp_path)
    assert not left.exists()
    second = WorkFolder(tmp_path)
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
    WorkFolder(tmp_path).remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", f"{PREFIX}file", f"{PREFIX}link"]
    assert (precious / "thesis").exists()


def test_one_that_another_process_took_for_abandoned_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, taken = work_folder.tempfile.mkdtemp, []

    def make_and_lose(*args: object, **named: str) -> str:
        path = make(*args, **named)
        if not taken:
            taken.append(os.open(path, os.O_RDONLY))
            fcntl.flock(taken[0], fcntl.LOCK_EX)
        return path

    monkeypatch.setattr(work_folder.tempfile, "mkdtemp", make_and_lose)
    folder = WorkFolder(tmp_path)
    assert len([*tmp_path.iterdir()]) == 2
    os.close(taken[0])
    WorkFolder(tmp_path).remove()
    assert [*tmp_path.iterdir()] == [folder.path]
    folder.remove()


def test_storage_without_locks_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / f"{PREFIX}other").mkdir()
    WorkFolder(tmp_path).remove()
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}other"], "it may be in use"
