"""Make token cache entries in tests, here or in processes that are killed and race.

As a program: `cache_entries.py FOLDER SEED CHUNKS [LINE]` says `ready`, waits for a line and writes the
entry. It names each chunk before it writes it, says `committing`, then how many lines of code the commit ran, and the
fingerprint of what it got. With LINE it kills itself before that line of the commit. Imports no tokenizer library, so
that such a process starts at once.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np

from spurline.data.token_store import SampleBlock, Tokenized, TokenStore, TokenStoreBuilder
from spurline_collation_fast.cache.entry import CacheKey
from spurline_collation_fast.cache.folder import TokenCache

LABELS = ("first", "second")
FINDINGS: Any = SimpleNamespace(dropped={"too_long": 3}, truncated=2, examples={"too_long": "a.jsonl:7"})


def make_key(name: str = "entry", labels: Sequence[str] = LABELS) -> CacheKey:
    return CacheKey(hashlib.md5(name.encode()).hexdigest(), {"name": name}, tuple(labels))


def make_chunks(seed: int = 0, count: int = 8, samples: int = 60, longest: int = 200) -> list[SampleBlock]:
    """Random samples of two datasets; some are empty."""
    random = np.random.default_rng(seed)
    chunks: list[SampleBlock] = []
    for number in range(count):
        lengths = random.integers(0, longest, samples)
        total = int(lengths.sum())
        tokens = random.integers(0, 150_000, total).astype(np.int32)
        mask = random.integers(0, 2, total).astype(np.uint8)
        rows = np.arange(samples) + 1000 * number
        chunks.append(SampleBlock(int(number >= count // 2), tokens, mask, lengths, rows))
    return chunks


def in_memory(chunks: Sequence[SampleBlock], labels: Sequence[str] = LABELS) -> TokenStore:
    builder = TokenStoreBuilder(labels)
    for chunk in chunks:
        builder.extend(chunk)
    return builder.build()


def write(cache: TokenCache, key: CacheKey, chunks: Sequence[SampleBlock]) -> Tokenized:
    with cache.writer(key) as writer:
        for chunk in chunks:
            writer.extend(chunk)
        writer.finish(Tokenized(writer.build(), **vars(FINDINGS)))
        return cache.commit(writer.folder, key)


def assert_same_store(found: TokenStore, expected: TokenStore) -> None:
    """Assert that two stores are equal for every reader, through `view`."""
    view = found.view(np.arange(len(found)))
    for name in ("tokens", "loss_mask", "offsets", "source", "row"):
        array, wanted = getattr(view.store, name), getattr(expected, name)
        assert type(array) is np.ndarray
        assert array.dtype == wanted.dtype, name
        assert not array.flags.writeable, name
        np.testing.assert_array_equal(array, wanted, err_msg=name)
    assert (found.sizes(), found.fingerprint, found.labels) == (expected.sizes(), expected.fingerprint, expected.labels)


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


def read_until(process: subprocess.Popen[str], announced: str) -> None:
    """Wait for the writer to say this."""
    assert process.stdout is not None
    while (line := process.stdout.readline()) != f"{announced}\n":
        assert line, process.communicate(timeout=60)


class _LineCounter:
    """Counts the lines of our own code that run, and ends the process by SIGKILL before line number `deadly`."""

    def __init__(self, deadly: int | None) -> None:
        self.lines = 0
        self._deadly = deadly

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "spurline" not in frame.f_code.co_filename:
            return None
        if event == "line":
            if self.lines == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            self.lines += 1
        return self


def _main() -> None:
    folder, seed, chunks, *options = sys.argv[1:]
    samples = make_chunks(int(seed), int(chunks))
    counter = _LineCounter(next((int(option) for option in options if option.isdecimal()), None))
    print("ready", flush=True)
    sys.stdin.readline()
    cache = TokenCache(Path(folder))
    with cache.writer(make_key()) as writer:
        for number, chunk in enumerate(samples):
            print(number, flush=True)
            writer.extend(chunk)
        print("committing", flush=True)
        sys.settrace(counter)
        writer.finish(Tokenized(writer.build(), **vars(FINDINGS)))
        store = cache.commit(writer.folder, make_key()).store
        sys.settrace(None)
    print(counter.lines)
    print(store.fingerprint)


if __name__ == "__main__":
    _main()
