"""An entry that somebody has changed on purpose, checksums and all, is set aside or refused; it never ends a process.

Tokens that are exchanged for other ones of the vocabulary cannot be told: who may write into the cache decides what is
trained on.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from cache_entries import make_chunks, make_key, write

from spurline.errors import DataError
from spurline_collation_fast.cache import mapped_store
from spurline_collation_fast.cache.folder import TokenCache
from spurline_collation_fast.cache.layout import (
    ARRAYS,
    BLOCK_BYTES,
    CHECKSUMS,
    MANIFEST,
    array_path,
    canonical_json,
)
from spurline_collation_fast.cache.upkeep import leftovers, sweep

KEY = make_key()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    write(TokenCache(folder), KEY, make_chunks(samples=120))
    return folder


@pytest.fixture
def entry(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "cache")
    return tmp_path / "cache" / KEY.digest


def seal(entry: Path, **changes: Any) -> None:
    """Give an entry the checksums and the digest of what it holds, as its writer would."""
    blocks = [
        content[begin : begin + BLOCK_BYTES]
        for content in (array_path(entry, name).read_bytes() for name in ARRAYS)
        for begin in range(0, len(content), BLOCK_BYTES)
    ]
    checksums = np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], "<u8").tobytes()
    (entry / CHECKSUMS).write_bytes(checksums)
    content = json.loads((entry / MANIFEST).read_text()) | {"checksums": xxhash.xxh3_128_hexdigest(checksums)} | changes
    del content["digest"]
    digest = xxhash.xxh3_128_hexdigest(canonical_json(content))
    (entry / MANIFEST).write_text(json.dumps({**content, "digest": digest}))


def forge(entry: Path, name: str, place: int, value: int) -> None:
    array = np.fromfile(array_path(entry, name), ARRAYS[name])
    array[place] = value
    array.tofile(array_path(entry, name))
    seal(entry)


def read_all(entry: Path) -> str:
    """`whole`, `rebuilt` or `refused`."""
    opened = TokenCache(entry.parent).open(KEY)
    if opened is None:
        return "rebuilt"
    try:
        store = opened.store
        for begin in range(0, sum(store.sizes()), 50):
            view = store.view(np.arange(begin, min(begin + 50, sum(store.sizes()))))
            for position in range(len(view)):
                assert len(view.tokens(position)) == len(view.loss_mask(position))
                view.uid(position)
        store.lengths()
    except DataError:
        return "refused"
    return "whole"


def test_an_entry_sealed_again_as_it_was_is_whole(entry: Path) -> None:
    seal(entry)
    assert read_all(entry) == "whole"


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    ("place", "value"),
    [(5, -1), (5, 2**62), (5, 10**9), (5, 0), (0, -(2**40)), (-1, 2**40), (-1, 0), (400, -(2**63))],
)
def test_offsets_out_of_order_or_beyond_the_tokens_are_no_tokens(
    place: int, value: int, eager: bool, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not eager:
        monkeypatch.setattr(mapped_store, "EAGER_BYTES", 0)
    forge(entry, "offsets", place, value)
    assert read_all(entry) in ("rebuilt", "refused")


@pytest.mark.parametrize("value", [-1, 2, 2**31 - 1])
def test_a_dataset_that_is_not_there_is_no_source(value: int, entry: Path) -> None:
    forge(entry, "source", 3, value)
    assert read_all(entry) in ("rebuilt", "refused")


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": -1},
        {"samples": 10**18},
        {"tokens": 10**18},
        {"tokens": "many"},
        {"sizes": [1, 2]},
        {"sizes": None},
        {"labels": ["first"]},
        {"findings": {"unknown": 3}},
        {"findings": []},
        {"surplus": 1},
        {"format": "1"},
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_its_entry_leads_to_a_rebuild(changes: Any, entry: Path) -> None:
    seal(entry, **changes)
    assert read_all(entry) == "rebuilt"


class Trap:
    """Pickled, it makes a folder where it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("name", ["tokens.bin", CHECKSUMS, MANIFEST])
def test_files_that_hold_objects_are_not_opened_as_such(name: str, entry: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([Trap(tmp_path / "ran")], dtype=object), allow_pickle=True)
    shutil.copy(tmp_path / "objects.npy", entry / name)
    assert TokenCache(entry.parent).open(KEY) is None
    assert not (tmp_path / "ran").exists()


def test_leftovers_that_are_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / ".retired-aa-0-bb").symlink_to(tmp_path / "precious")
    sweep(cache)
    assert (tmp_path / "precious" / "thesis.txt").exists()
    assert not list(leftovers(cache))
