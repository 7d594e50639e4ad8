"""A store in the cache is the store in memory, at a constant cost of opening."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from cache_entries import FINDINGS, assert_same_store, in_memory, make_chunks, make_key, write
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.token_store import SampleBlock, Tokenized, summarize
from spurline_collation_fast.cache import entry
from spurline_collation_fast.cache.folder import TokenCache

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
        patch.setattr(entry, "_READ_WHOLE_BYTES", 2**30 if eager else -1)
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
