"""Hashes of data files: never stale, and not computed twice for a large file that did not change."""

from __future__ import annotations

import os

import pytest
import xxhash

from spurline_text.datasets import file_digest
from spurline_text.datasets.file_digest import digest_of_file, digest_of_files, memory_folder


@pytest.fixture(autouse=True)
def _own_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("SPURLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digest, "REMEMBER_FROM_BYTES", 1)
    monkeypatch.setattr(file_digest, "SETTLED_AFTER_NS", -1)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"one content")
    return path


def refuse_reading(monkeypatch) -> None:
    def refuse(path):
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(file_digest, "_read_and_hash", refuse)


def test_the_digest_is_that_of_the_content(data):
    assert digest_of_file(data) == xxhash.xxh3_128_hexdigest(b"one content")


def test_an_unchanged_file_is_not_read_again(data, monkeypatch):
    first = digest_of_file(data)
    refuse_reading(monkeypatch)
    assert digest_of_file(data) == first


def test_new_content_of_the_same_size_and_time_gives_a_new_digest(data):
    first, before = digest_of_file(data), data.stat()
    data.write_bytes(b"two content")
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_of_file(data) == xxhash.xxh3_128_hexdigest(b"two content") != first


def test_a_touched_or_renamed_file_has_its_old_digest(data, tmp_path):
    first = digest_of_file(data)
    os.utime(data, ns=(1, 1))
    assert digest_of_file(data) == first
    assert digest_of_file(data.rename(tmp_path / "other.bin")) == first


def test_a_file_that_was_just_changed_is_not_remembered(data, monkeypatch):
    monkeypatch.setattr(file_digest, "SETTLED_AFTER_NS", 60_000_000_000)
    digest_of_file(data)
    assert not memory_folder().exists()


def test_a_memory_that_was_cut_short_is_ignored(data):
    first = digest_of_file(data)
    (memory,) = memory_folder().iterdir()
    memory.write_text(first[:7])
    assert digest_of_file(data) == first


def test_without_a_place_to_remember_the_digest_is_still_right(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPURLINE_CACHE", str(tmp_path / "file"))
    assert digest_of_file(data) == xxhash.xxh3_128_hexdigest(b"one content")


def test_without_a_home_the_digest_is_still_right(data, monkeypatch):
    monkeypatch.delenv("SPURLINE_CACHE")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert memory_folder() is None
    assert digest_of_file(data) == xxhash.xxh3_128_hexdigest(b"one content")


def test_the_digest_of_several_files_depends_on_their_order_and_borders(tmp_path):
    contents = {"a": b"ab", "b": b"c", "c": b"a", "d": b"bc"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    digests = {digest_of_files([tmp_path / name for name in names]) for names in ("ab", "ba", "cd", "abc")}
    assert len(digests) == 4
