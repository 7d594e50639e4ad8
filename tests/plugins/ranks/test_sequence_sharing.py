"""Ranks that share a stream compute what one rank computes alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_workers import PROFILE, computed, stream_of

from spurline.protocols.ranks import RankRequest
from spurline_ranks.group import RankGroup, TimeLimits, open_ranks
from spurline_ranks.sequence_sharing import SequenceSharing

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6).map(sorted)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    request = RankRequest(4, num_threads=1)
    group = open_ranks(request, "sharing_workers:SharingRank", (2, 4), TimeLimits(120, 60, 60))
    yield group
    group.close()


def losses(lengths: list[int], seed: int) -> list[bool]:
    return (np.random.default_rng(seed).random(sum(lengths)) < 0.6).tolist()


@pytest.mark.processes
@settings(max_examples=30)
@given(
    size=st.sampled_from([1, 2, 4]),
    lengths=LENGTHS,
    seed=st.integers(0, 99),
    multiple=st.sampled_from([1, 2, 3]),
    at_least=st.sampled_from([0, 1, 30, 61]),
)
def test_parts_make_up_the_stream_and_have_the_length_that_was_asked_for(
    ranks: RankGroup, size: int, lengths: list[int], seed: int, multiple: int, at_least: int
) -> None:
    loss = losses(lengths, seed)
    stream = stream_of(lengths, loss)
    parts = ranks.call("parts", size, lengths, loss, multiple, at_least)
    for first in range(0, 4, size):
        sharing = parts[first : first + size]
        assert len({len(part["tokens"]) for part in sharing}) == 1
        own = len(sharing[0]["tokens"])
        assert own % multiple == 0
        total, padding = own * size, own * size - stream.num_tokens
        assert total >= max(at_least, stream.num_tokens)
        assert total - size * multiple < max(at_least, stream.num_tokens), "more padding than needed"
        whole = np.concatenate([part["tokens"] for part in sharing])
        assert whole[padding:].tolist() == stream.input_ids[0].tolist()
        positions = np.concatenate([part["positions"] for part in sharing])
        assert positions[padding:].tolist() == stream.position_ids[0].tolist()
        assert not positions[:padding].any()
        # Every rank knows the segments of all tokens, and padding is in none of them.
        starts = [*range(padding), *(stream.plan.cu_seqlens + padding).tolist()]
        assert all(part["starts"].tolist() == starts for part in sharing)
        sources = np.concatenate([part["source"] + rank * own for rank, part in enumerate(sharing)])
        assert sources.tolist() == (stream.source + padding).tolist()
        assert np.concatenate([part["targets"] for part in sharing]).tolist() == stream.targets.tolist()
        covered = [index for part in sharing for index in range(part["mine"].start, part["mine"].stop)]
        assert covered == list(range(len(stream.targets)))
        assert all(part["exchanges"] == (size > 1) for part in sharing)
        assert all(part["unchanged"] == (size == 1 and padding == 0) for part in sharing)


@pytest.mark.processes
@settings(max_examples=25)
@given(
    size=st.sampled_from([1, 2, 4]),
    lengths=LENGTHS,
    seed=st.integers(0, 99),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (8, 2)]),
    multiple=st.sampled_from([1, 2, 3]),
)
def test_attention_of_a_shared_stream_is_that_of_the_whole_in_values_and_gradients(
    ranks: RankGroup, size: int, lengths: list[int], seed: int, heads: tuple[int, int], multiple: int
) -> None:
    loss = losses(lengths, seed)
    stream = stream_of(lengths, loss)
    tables, values = computed(stream, stream, *heads)
    expected = [values, *torch.autograd.grad((values**2).sum(), tables)]
    for answer in ranks.call("attends", size, lengths, loss, *heads, multiple):
        for got, wanted in zip(answer, expected, strict=True):
            np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_an_idle_stream_can_be_padded_too() -> None:
    stream = stream_of([2], [True])
    part, mine = SequenceSharing(None, PROFILE).part_of(stream, multiple=4)
    assert part.num_tokens == 4
    assert mine == slice(0, 1)
    assert part.source.tolist() == [2]
