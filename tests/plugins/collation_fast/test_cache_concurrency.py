"""Writers race, are killed, and replace entries that others read: the cache is valid at every instant."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

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

from spurline_collation_fast.cache.folder import TokenCache, remove

CHUNKS = 60
KEY = make_key()


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
        slower.finish(FINDINGS)
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


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class BrokenError(Exception):
        pass

    with pytest.raises(BrokenError), TokenCache(tmp_path).writer(KEY) as writer:  # noqa: PT012
        writer.extend(make_chunks()[0])
        raise BrokenError
    assert list(tmp_path.iterdir()) == []


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
