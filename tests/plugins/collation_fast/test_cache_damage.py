"""An entry comes back as it was written; one that was cut, changed or forged is made again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import xxhash
from cache_entries import FINDINGS, assert_same_store, in_memory, make_chunks, make_key, write
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.token_store import SampleBlock, Tokenized, TokenStore, summarize
from spurline.errors import DataError
from spurline_collation_fast.cache import entry as entry_module
from spurline_collation_fast.cache import folder as cache_folder
from spurline_collation_fast.cache.entry import ARRAYS, MANIFEST, DamagedEntry, array_path, open_entry
from spurline_collation_fast.cache.folder import TokenCache

KEY = make_key()
FILES = ("tokens.bin", "loss_mask.bin", "offsets.bin", "source.bin", "row.bin", MANIFEST)


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


def assert_rebuilt(entry: Path, expected: TokenStore) -> str:
    """The entry is not served; the tokens are made again under its key. Returns the note."""
    cache = TokenCache(entry.parent)
    assert cache.open(KEY) is None
    [note] = cache.notes
    rebuilt = write(cache, KEY, make_chunks(samples=120))
    assert_same_store(rebuilt.store, expected)
    assert rebuilt.notes == (note,)
    return note


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("change", ["cut", "longer", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_size_leads_to_a_rebuild(damaged: Path, expected: TokenStore, name: str, change: str) -> None:
    path = damaged / name
    content = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes(content[: len(content) // 2] if change == "cut" else content + bytes(8))
    assert_rebuilt(damaged, expected)


def test_an_entry_under_a_wrong_name_leads_to_a_rebuild(damaged: Path) -> None:
    other = make_key("another")
    damaged.rename(damaged.parent / other.digest)
    cache = TokenCache(damaged.parent)
    assert cache.open(other) is None
    assert MANIFEST in cache.notes[0]


@pytest.mark.parametrize("name", FILES[:-1])
def test_a_flipped_bit_is_found_in_a_small_entry_at_once_and_in_a_large_one_by_verify(
    damaged: Path, expected: TokenStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(damaged / name, 0)
    with monkeypatch.context() as patch:
        patch.setattr(entry_module, "_READ_WHOLE_BYTES", 0)
        if name not in ("offsets.bin", "source.bin"):
            assert TokenCache(damaged.parent).open(KEY) is not None
        with pytest.raises(DamagedEntry, match=name):
            open_entry(damaged, whole=True)
    assert name in assert_rebuilt(damaged, expected)


def test_a_damaged_entry_that_cannot_be_removed_is_left_alone(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache_folder, "remove", refuse)
    flip(damaged / "row.bin", 3)
    with pytest.raises(PermissionError):
        TokenCache(damaged.parent).open(KEY)
    with pytest.raises(DataError, match="cannot be written: Permission denied"):
        write(TokenCache(damaged.parent), KEY, make_chunks())
    assert [path.name for path in damaged.parent.iterdir()] == [KEY.digest]


# Changed on purpose, with digests that fit. Tokens that are exchanged for other ones of the vocabulary cannot be told:
# those who may write into the cache decide what is trained on.


def seal(entry: Path, summary: Any = None, **changes: Any) -> None:
    """Give an entry the digests of what it holds, as its writer would."""
    digests = {name: xxhash.xxh3_128_hexdigest(array_path(entry, name).read_bytes()) for name in ARRAYS}
    content = json.loads((entry / MANIFEST).read_text()) | {"digests": digests} | changes
    content["summary"] |= summary or {}
    (entry / MANIFEST).write_text(json.dumps(content))


def test_an_entry_sealed_again_as_it_was_is_whole(damaged: Path, expected: TokenStore) -> None:
    seal(damaged)
    opened = TokenCache(damaged.parent).open(KEY)
    assert opened is not None
    assert_same_store(opened.store, expected)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        *[("offsets", place, value) for place, value in ((5, -1), (5, 2**62), (5, 0), (0, -(2**40)), (-1, 2**40))],
        *[("source", 3, value) for value in (-1, 2, 2**31 - 1)],
    ],
)
def test_places_beyond_the_entry_lead_to_a_rebuild(
    name: str, place: int, value: int, damaged: Path, expected: TokenStore
) -> None:
    array = np.fromfile(array_path(damaged, name), ARRAYS[name])
    array[place] = value
    array.tofile(array_path(damaged, name))
    seal(damaged)
    assert_rebuilt(damaged, expected)


@pytest.mark.parametrize(
    "changes",
    [
        *({"summary": {"tokens": tokens}} for tokens in (10**18, "many", -1)),
        *({"summary": {"sources": sources}} for sources in (None, [1, 2], {"first": 480}, {"first": 1, "second": 2})),
        *({"surplus": 1}, {"format": "1"}, {"digests": {}}),
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_its_entry_leads_to_a_rebuild(
    changes: Any, damaged: Path, expected: TokenStore
) -> None:
    seal(damaged, **changes)
    assert_rebuilt(damaged, expected)


sample = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), max_size=20)
chunk = st.tuples(st.lists(sample, max_size=5), st.integers(0, 1), st.integers(0, 2**40))


@settings(max_examples=60, deadline=None)
@given(chunks=st.lists(chunk, max_size=5), eager=st.booleans())
def test_any_samples_come_back_as_the_store_in_memory_would_give_them(chunks: list[Any], eager: bool) -> None:
    blocks = []
    for samples, source, first_row in chunks:
        flat = [pair for pairs in samples for pair in pairs]
        tokens = np.array([token for token, _ in flat], np.int32)
        mask = np.array([bit for _, bit in flat], np.uint8)
        lengths = np.array([len(pairs) for pairs in samples], np.int64)
        blocks.append(SampleBlock(source, tokens, mask, lengths, first_row + np.arange(len(samples))))
    expected = in_memory(blocks)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_module, "_READ_WHOLE_BYTES", 2**30 if eager else -1)
        written = write(TokenCache(Path(folder)), make_key(), blocks)
        opened = TokenCache(Path(folder)).open(make_key())
        assert opened is not None
        in_ram = Tokenized(expected, FINDINGS.dropped, FINDINGS.truncated, FINDINGS.examples)
        for tokenized in (written, opened):
            assert_same_store(tokenized.store, expected)
            np.testing.assert_array_equal(tokenized.store.lengths(), expected.lengths())
            assert summarize(tokenized) == summarize(in_ram)
            assert (tokenized.dropped, tokenized.truncated, tokenized.examples) == (
                FINDINGS.dropped,
                FINDINGS.truncated,
                FINDINGS.examples,
            )


def test_the_sink_builds_the_same_store_before_it_is_committed(tmp_path: Path) -> None:
    chunks = make_chunks()
    with TokenCache(tmp_path).writer(make_key()) as writer:
        for block in chunks:
            writer.extend(block)
        assert_same_store(writer.build(), in_memory(chunks))
    assert list(tmp_path.iterdir()) == []


def test_a_renamed_dataset_finds_its_tokens_under_its_new_label(tmp_path: Path) -> None:
    write(TokenCache(tmp_path), make_key(), make_chunks())
    opened = TokenCache(tmp_path).open(make_key(labels=("new", "second")))
    assert opened is not None
    assert opened.store.uid(0) == "new:0"
    assert list(summarize(opened)["sources"]) == ["new", "second"]
