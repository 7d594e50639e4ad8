"""Read-only folders and full disks: hits are served, failures say what to do, and nothing half-written stays."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cache_entries import assert_same_store, in_memory, make_chunks, make_key, write

from spurline.errors import DataError
from spurline_collation_fast.cache import entry, folder
from spurline_collation_fast.cache.entry import EntryWriter
from spurline_collation_fast.cache.folder import TokenCache, default_cache_folder

KEY = make_key()


def test_hits_are_served_from_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(TokenCache(tmp_path), KEY, make_chunks())
    before = sorted(tmp_path.rglob("*"))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    # Root may write anywhere, so the system calls refuse in place of the file system.
    for name in ("utime", "rename", "mkdir", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    opened = TokenCache(tmp_path).open(KEY)
    assert opened is not None
    assert opened.notes == ()
    assert_same_store(opened.store, in_memory(make_chunks()))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", ["/proc/self/cache", "a file/cache"])
def test_a_folder_that_cannot_be_written_is_a_miss_and_says_so(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").write_text("in the way")
    cache = TokenCache(tmp_path / place)
    assert cache.open(KEY) is None
    with pytest.raises(OSError, match="cache"):
        cache.check_writable()
    with pytest.raises(DataError, match="the token cache cannot be written"):
        write(cache, KEY, make_chunks())


@pytest.mark.parametrize("array", entry.ARRAYS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_and_says_where_and_what_to_do(
    tmp_path: Path, array: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = EntryWriter._append, []

    def append(writer: EntryWriter, name: str, values: Any) -> None:
        calls.append(name)
        if calls.count(array) == 3 and name == array:
            real(writer, name, values[: len(values) // 2])
            raise OSError(code, os.strerror(code))
        real(writer, name, values)

    monkeypatch.setattr(EntryWriter, "_append", append)
    with pytest.raises(DataError) as caught:
        write(TokenCache(tmp_path), KEY, make_chunks())
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: the token cache cannot be written: {os.strerror(code)}")
    assert "cache_dir" in message
    assert "disable_cache" in message
    assert "spurline cache prune" in message
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(entry, "sync_file", fail)
    with pytest.raises(DataError, match="cannot be written: Input/output error"):
        write(TokenCache(tmp_path), KEY, make_chunks())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_file_size_limit_of_the_system_is_met_as_a_full_disk(tmp_path: Path) -> None:
    program = f"""
import resource
from pathlib import Path
from cache_entries import TokenCache, make_chunks, make_key, write
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
write(TokenCache(Path({str(tmp_path)!r})), make_key(), make_chunks())
"""
    support = Path(__file__).parents[2] / "support"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": ":".join([str(support), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "DataError" in result.stderr
    assert "the token cache cannot be written" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_caller_is_not_taken_for_one_of_the_cache(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), TokenCache(tmp_path).writer(KEY):
        (tmp_path / "data.jsonl").read_text()


def test_the_folder_is_that_of_the_environment_else_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPURLINE_CACHE", raising=False)
    assert default_cache_folder() == tmp_path / ".cache/spurline/tokens"
    monkeypatch.setenv("SPURLINE_CACHE", "~/elsewhere")
    assert default_cache_folder() == tmp_path / "elsewhere"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["manifest.json", "tokens.bin", ""])
def test_an_entry_that_cannot_be_read_now_is_left_alone(
    tmp_path: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(TokenCache(tmp_path), KEY, make_chunks())
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        refuse_paths(patch, (tmp_path / KEY.digest / name), code)
        cache = TokenCache(tmp_path)
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            cache.open(KEY)
    assert cache.notes == []
    assert sorted(tmp_path.rglob("*")) == before
    opened = TokenCache(tmp_path).open(KEY)
    assert opened is not None
    assert_same_store(opened.store, in_memory(make_chunks()))


def refuse_paths(patch: pytest.MonkeyPatch, path: Path, code: int) -> None:
    """Reading this file, or looking at this folder, fails with that error."""

    def refusing(real: Any) -> Any:
        def call(self: Path, *arguments: Any, **named: Any) -> Any:
            if self == path:
                raise OSError(code, os.strerror(code))
            return real(self, *arguments, **named)

        return call

    for name in ("open", "stat", "read_bytes"):
        patch.setattr(Path, name, refusing(getattr(Path, name)))


def test_an_entry_whose_files_stay_while_a_reader_has_them_gives_way_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TokenCache(tmp_path)
    write(cache, KEY, make_chunks(seed=1))

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(folder, "remove_path", refuse)
        cache.discard(KEY)
        made = write(cache, KEY, make_chunks(seed=2))
    assert_same_store(made.store, in_memory(make_chunks(seed=2)))
    assert len(list(tmp_path.iterdir())) == 2
    folder.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [KEY.digest]
