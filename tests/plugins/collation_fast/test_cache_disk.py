"""The cache is valid on full and read-only disks, and at every instant while writers race and are killed."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cache_entries import (
    FINDINGS,
    assert_same_store,
    begin,
    in_memory,
    make_chunks,
    make_key,
    read_until,
    start_writer,
    write,
)

from spurline.data.token_store import Tokenized
from spurline.errors import DataError
from spurline_collation_fast.cache import entry, folder
from spurline_collation_fast.cache.entry import EntryWriter
from spurline_collation_fast.cache.folder import TokenCache, remove
from spurline_collation_fast.configs import default_cache_folder

KEY = make_key()
CHUNKS = 60


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


def test_an_error_of_the_caller_leaves_nothing_and_is_not_taken_for_one_of_the_cache(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), TokenCache(tmp_path).writer(KEY) as writer:  # noqa: PT012
        writer.extend(make_chunks()[0])
        (tmp_path / "data.jsonl").read_text()
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.slow
def test_a_writer_killed_at_any_instant_leaves_a_whole_entry_or_none(tmp_path: Path) -> None:
    kills = 200 if os.environ.get("SPURLINE_SOAK") else 20
    chunks = make_chunks(seed=2, count=CHUNKS)
    expected = in_memory(chunks)
    *_, lines_of_commit, fingerprint = start_writer(tmp_path, 2, CHUNKS).communicate("begin\n", timeout=60)[0].split()
    assert fingerprint == expected.fingerprint
    instants = random.Random(0)
    found = {True: 0, False: 0}
    for kill in range(kills):
        remove(tmp_path / KEY.digest)
        if kill % 5 < 2:
            _kill_from_outside(start_writer(tmp_path, 2, CHUNKS), instants)
        else:
            # Lines spread evenly over the commit: on a machine of any speed some come before the entry is in place
            # and some after it.
            line = int((kill + instants.random()) / kills * int(lines_of_commit))
            process = start_writer(tmp_path, 2, CHUNKS, str(line))
            begin(process)
            process.communicate(timeout=60)
        cache = TokenCache(tmp_path)
        opened = cache.open(KEY)
        assert cache.notes == []
        if opened is not None:
            assert_same_store(opened.store, expected)
        found[opened is not None] += 1
        assert_same_store(write(cache, KEY, chunks).store, expected)
        assert not list(tmp_path.glob(".writing-*")), "the next writer sweeps what a dead one left"
    assert all(found.values()), f"the instants missed a state: {found}"


def _kill_from_outside(process: subprocess.Popen[str], instants: random.Random) -> None:
    """Kill inside system calls too: soon after some chunk, or the commit, was begun.

    A slow machine may let the writer finish first, so a test cannot expect which state this leaves.
    """
    begin(process)
    read_until(process, "committing" if instants.random() < 0.5 else str(instants.randrange(CHUNKS)))
    time.sleep(instants.uniform(0, 0.02))
    process.kill()
    process.communicate(timeout=60)


@pytest.mark.processes
def test_eight_writers_of_one_key_agree_on_one_entry(tmp_path: Path) -> None:
    expected = in_memory(make_chunks(seed=3, count=CHUNKS))
    processes = [start_writer(tmp_path, 3, CHUNKS) for _ in range(8)]
    for process in processes:
        begin(process)
    answers = [process.communicate(timeout=120) for process in processes]
    assert [out.split()[-1:] for out, _ in answers] == [[expected.fingerprint]] * 8, answers
    assert [path.name for path in tmp_path.iterdir()] == [KEY.digest]
    opened = TokenCache(tmp_path).open(KEY)
    assert opened is not None
    assert_same_store(opened.store, expected)


@pytest.mark.parametrize("winner", ["whole", "damaged"])
def test_the_slower_of_two_writers_opens_the_entry_of_the_faster_unless_it_is_damaged(
    tmp_path: Path, winner: str
) -> None:
    chunks, cache = make_chunks(), TokenCache(tmp_path)
    with cache.writer(KEY) as slower:
        for chunk in chunks:
            slower.extend(chunk)
        slower.finish(Tokenized(slower.build(), **vars(FINDINGS)))
        write(TokenCache(tmp_path), KEY, chunks)
        before = (tmp_path / KEY.digest).stat().st_ino
        if winner == "damaged":
            (tmp_path / KEY.digest / "tokens.bin").write_bytes(b"")
        tokenized = cache.commit(slower.folder, KEY)
    assert_same_store(tokenized.store, in_memory(chunks))
    assert ((tmp_path / KEY.digest).stat().st_ino == before) == (winner == "whole")
    assert ("tokens.bin has 0 bytes" in "".join(tokenized.notes)) == (winner == "damaged")
    assert [path.name for path in tmp_path.iterdir()] == [KEY.digest]


def test_an_entry_stays_readable_when_it_is_discarded_and_made_again(tmp_path: Path) -> None:
    old, new, cache = make_chunks(seed=1), make_chunks(seed=2), TokenCache(tmp_path)
    reader = write(cache, KEY, old).store
    cache.discard(KEY)
    assert_same_store(write(cache, KEY, new).store, in_memory(new))
    assert_same_store(reader, in_memory(old))
    assert [path.name for path in tmp_path.iterdir()] == [KEY.digest]


def test_a_writer_sweeps_what_the_dead_left_and_nothing_of_the_living(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    cache = tmp_path / "cache"
    for name in (".writing-dead", f".removed-{KEY.digest}-1"):
        (cache / name).mkdir(parents=True)
        (cache / name / "tokens.bin").write_bytes(b"1")
    (cache / ".removed-link").symlink_to(tmp_path / "precious")
    with TokenCache(cache).writer(make_key("another")) as living:
        assert_same_store(write(TokenCache(cache), KEY, make_chunks()).store, in_memory(make_chunks()))
        assert sorted(cache.iterdir()) == sorted([living.folder, cache / KEY.digest])
    assert (tmp_path / "precious").is_dir()


def test_an_entry_may_be_read_by_those_who_may_read_the_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write(TokenCache(tmp_path), KEY, make_chunks())
    assert (tmp_path / KEY.digest).stat().st_mode & 0o777 == 0o755
