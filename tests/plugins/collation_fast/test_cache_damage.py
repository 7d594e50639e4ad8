"""Whatever happens to the files, the cache gives the right tokens, none, or an error; never wrong ones."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from cache_entries import assert_same_store, in_memory, make_chunks, make_key, write

from spurline.data.token_store import TokenStore
from spurline.errors import DataError
from spurline_collation_fast.cache import folder as cache_folder
from spurline_collation_fast.cache import mapped_store
from spurline_collation_fast.cache.folder import TokenCache
from spurline_collation_fast.cache.layout import CHECKSUMS, MANIFEST

KEY = make_key()
FILES = ("tokens.bin", "loss_mask.bin", "offsets.bin", "source.bin", "row.bin", CHECKSUMS, MANIFEST)
SOAK = bool(os.environ.get("SPURLINE_SOAK"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with one whole entry of several blocks; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("pristine")
    write(TokenCache(folder), KEY, make_chunks(samples=120))
    return folder


@pytest.fixture(scope="module")
def expected() -> TokenStore:
    return in_memory(make_chunks(samples=120))


@pytest.fixture
def damaged(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the entry, in a cache folder of its own."""
    shutil.copytree(pristine, tmp_path / "cache")
    return tmp_path / "cache" / KEY.digest


def assert_never_wrong(entry: Path, expected: TokenStore) -> str:
    """Open and read it all; what happened: `whole`, `rebuilt` or `refused`. The next start must be fine in any case."""
    cache, outcome = TokenCache(entry.parent), "whole"
    opened = cache.open(KEY)
    if opened is None:
        outcome = "rebuilt"
        assert "set aside" in cache.notes[0]
    else:
        try:
            assert_same_store(opened.store, expected)
        except DataError as error:
            outcome, message = "refused", str(error)
            assert "Run the same command again" in message
    if outcome != "whole":
        assert TokenCache(entry.parent).open(KEY) is None
        rebuilt = write(cache, KEY, make_chunks(samples=120))
        assert_same_store(rebuilt.store, expected)
        assert rebuilt.notes == tuple(cache.notes)
    return outcome


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def test_the_undamaged_entry_is_whole(damaged: Path, expected: TokenStore) -> None:
    assert assert_never_wrong(damaged, expected) == "whole"


@pytest.mark.slow
def test_every_truncation_of_the_manifest_leads_to_a_rebuild(damaged: Path) -> None:
    content = (damaged / MANIFEST).read_bytes()
    backup = damaged.parent.parent / "backup"
    for length in range(len(content)):
        (damaged / MANIFEST).write_bytes(content[:length])
        cache = TokenCache(damaged.parent)
        if cache.open(KEY) is not None:
            # Only the line break at the end says nothing.
            assert content[length:] == b"\n", length
            continue
        assert MANIFEST in cache.notes[0]
        [aside] = damaged.parent.glob(".retired-*")
        aside.rename(backup)
        backup.rename(damaged)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_data_file_leads_to_a_rebuild(damaged: Path, expected: TokenStore, name: str) -> None:
    os.truncate(damaged / name, (damaged / name).stat().st_size // 2)
    assert assert_never_wrong(damaged, expected) == "rebuilt"


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_bytes_added_leads_to_a_rebuild(damaged: Path, expected: TokenStore, name: str) -> None:
    with (damaged / name).open("ab") as file:
        file.write(b"\0" * 8)
    assert assert_never_wrong(damaged, expected) == "rebuilt"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_leads_to_a_rebuild(damaged: Path, expected: TokenStore, name: str) -> None:
    (damaged / name).unlink()
    assert assert_never_wrong(damaged, expected) == "rebuilt"


def test_an_entry_under_a_wrong_name_leads_to_a_rebuild(damaged: Path) -> None:
    other = make_key("another")
    damaged.rename(damaged.parent / other.digest)
    cache = TokenCache(damaged.parent)
    assert cache.open(other) is None
    assert "renamed" in cache.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_flipped_bit_never_gives_wrong_tokens(
    damaged: Path, expected: TokenStore, name: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_store, "EAGER_BYTES", 0 if large else mapped_store.EAGER_BYTES)
    places = random.Random(f"{name} {large}")
    backup = damaged.parent.parent / "backup"
    shutil.copytree(damaged, backup)
    size = (damaged / name).stat().st_size
    at_first_touch = large and name not in (CHECKSUMS, MANIFEST)
    for position in [0, size - 1, *(places.randrange(size) for _ in range(100 if SOAK else 8))]:
        flip(damaged / name, position, places.randrange(8))
        outcome = assert_never_wrong(damaged, expected)
        if name != MANIFEST:  # White space in the manifest says nothing.
            assert outcome == ("refused" if at_first_touch else "rebuilt"), position
        shutil.rmtree(damaged)
        shutil.copytree(backup, damaged)


def test_a_view_of_whole_samples_works_beside_a_damaged_block(
    damaged: Path, expected: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_store, "EAGER_BYTES", 0)
    flip(damaged / "tokens.bin", -1)
    opened = TokenCache(damaged.parent).open(KEY)
    assert opened is not None
    last = len(expected) - 1
    np.testing.assert_array_equal(opened.store.view(np.array([0])).tokens(0), expected.view(np.array([0])).tokens(0))
    with pytest.raises(DataError, match=r"tokens\.bin block \d+ .* does not match its checksum"):
        opened.store.view(np.array([0, last]))
    with pytest.raises(DataError, match="does not match"):
        opened.store.view(np.array([last]))
    assert not damaged.exists()


def test_damage_found_in_an_old_mapping_leaves_the_new_entry_alone(
    damaged: Path, expected: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_store, "EAGER_BYTES", 0)
    flip(damaged / "tokens.bin", -1)
    old = TokenCache(damaged.parent).open(KEY)
    assert old is not None
    write(TokenCache(damaged.parent), KEY, make_chunks(samples=120), replace=True)
    with pytest.raises(DataError, match="Run the same command again"):
        old.store.lengths(), old.store.view(np.arange(len(old.store)))
    assert assert_never_wrong(damaged, expected) == "whole"


def test_a_damaged_entry_that_cannot_be_set_aside_says_what_to_delete(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache_folder, "retire", refuse)
    flip(damaged / "row.bin", 3)
    cache = TokenCache(damaged.parent)
    assert cache.open(KEY) is None
    problem = cache.write_problem(KEY)
    assert problem is not None
    assert f"Delete {damaged}" in problem
    with pytest.raises(DataError, match="cannot be put in place") as caught:
        write(TokenCache(damaged.parent), KEY, make_chunks())
    assert str(caught.value).count("does not match") == 1, "the same is said again and again"
    assert [path.name for path in damaged.parent.iterdir()] == [KEY.digest]
