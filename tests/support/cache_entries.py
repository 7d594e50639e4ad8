"""Make token cache entries in tests, here or in processes that are killed and race.

As a program: `cache_entries.py FOLDER SEED CHUNKS [replace]` says `ready`, waits for a line, writes the entry and
prints the fingerprint of what it got. Imports no tokenizer library, so that such a process starts at once.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.token_store import TokenStore, TokenStoreBuilder
from spurline.protocols.tokenization import Tokenized
from spurline_collation_fast.cache.folder import TokenCache
from spurline_collation_fast.cache.layout import CacheKey

LABELS = ("first", "second")
FINDINGS: Any = SimpleNamespace(dropped={"too_long": 3}, truncated=2, examples={"too_long": "a.jsonl:7"})

Chunk = tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.int64], int, NDArray[np.int64]]
"""Arguments of `SampleSink.extend`."""


def make_key(name: str = "entry", labels: Sequence[str] = LABELS) -> CacheKey:
    return CacheKey(hashlib.md5(name.encode()).hexdigest(), {"name": name}, tuple(labels))


def make_chunks(seed: int = 0, count: int = 8, samples: int = 60, longest: int = 200) -> list[Chunk]:
    """Random samples of two datasets; some are empty."""
    random = np.random.default_rng(seed)
    chunks: list[Chunk] = []
    for number in range(count):
        lengths = random.integers(0, longest, samples)
        total = int(lengths.sum())
        tokens = random.integers(0, 150_000, total).astype(np.int32)
        mask = random.integers(0, 2, total).astype(np.uint8)
        chunks.append((tokens, mask, lengths, int(number >= count // 2), np.arange(samples) + 1000 * number))
    return chunks


def in_memory(chunks: Sequence[Chunk], labels: Sequence[str] = LABELS) -> TokenStore:
    builder = TokenStoreBuilder(labels)
    for chunk in chunks:
        builder.extend(*chunk)
    return builder.build()


def write(cache: TokenCache, key: CacheKey, chunks: Sequence[Chunk], *, replace: bool = False) -> Tokenized:
    with cache.writer(key, replace=replace) as writer:
        for chunk in chunks:
            writer.extend(*chunk)
        return writer.commit(FINDINGS)


def assert_same_store(found: TokenStore, expected: TokenStore) -> None:
    """Equal in everything a reader can see, read through `view`."""
    view = found.view(np.arange(len(found)))
    for name in ("tokens", "loss_mask", "offsets", "source", "row"):
        array, wanted = getattr(view.store, name), getattr(expected, name)
        assert type(array) is np.ndarray
        assert array.dtype == wanted.dtype, name
        assert not array.flags.writeable, name
        np.testing.assert_array_equal(array, wanted, err_msg=name)
    assert (found.sizes(), found.fingerprint, found.labels) == (
        expected.sizes(),
        expected.fingerprint,
        expected.labels,
    )


def start_writer(folder: Path, seed: int, chunks: int, *options: str) -> subprocess.Popen[str]:
    """A process that is ready to write; send it a line to begin."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(seed), str(chunks), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate(timeout=60)
    return process


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("begin\n")
    process.stdin.flush()


def _main() -> None:
    folder, seed, chunks, *options = sys.argv[1:]
    samples = make_chunks(int(seed), int(chunks))
    print("ready", flush=True)
    sys.stdin.readline()
    print(write(TokenCache(Path(folder)), make_key(), samples, replace="replace" in options).store.fingerprint)


if __name__ == "__main__":
    _main()
