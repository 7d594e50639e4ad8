"""A batch of many tokens is laid out piece by piece, and nobody can tell."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from fast_kernels import dirty_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.protocols.collator import ParallelLayout
from spurline.testing.collator_contract import assert_batches_equal
from spurline_collation_fast import collators
from spurline_collation_fast.collators import FastRolloutsCollator
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.rollouts_collator import RolloutsCollator
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import FlatTurns

OWN, MOST = 12, 30


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collators, "_OWN_PIECE_TOKENS", OWN)
    monkeypatch.setattr(collators, "_PIECE_TOKENS", MOST)


def blocks_of(turns: Any, cuts: list[int], seed: int) -> tuple[list[Any], list[FlatTurns]]:
    attempts = make_trajectories(turns, seed, routed_experts=True)
    bounds = [0, *sorted(min(cut, len(turns)) for cut in cuts), len(turns)]
    return attempts, [FlatTurns.of(attempts[start:stop]) for start, stop in pairwise(bounds)]


TURNS = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any), min_size=1, max_size=3), max_size=14
)


@given(
    TURNS,
    st.lists(st.integers(0, 14), max_size=12),
    st.integers(1, 5),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["numba", "numpy"]),
    st.integers(0, 9),
)
@settings(max_examples=60)
def test_the_batch_is_that_of_the_reference(
    turns: Any, cuts: list[int], ranks: int, pad_side: Any, kernels: str, seed: int
) -> None:
    attempts, blocks = blocks_of(turns, cuts, seed)
    config, layout = RolloutsCollatorConfig(pad_side=pad_side), ParallelLayout(data=ranks)
    batch = FastRolloutsCollator(config, 9, layout, dirty_kernels(kernels)).collate_flat(blocks)
    assert_batches_equal(batch, RolloutsCollator(config, 9, layout).collate_rollouts(attempts))


@pytest.mark.parametrize("kernels", ["numba", "numpy"])
def test_a_column_that_only_some_pieces_have_is_left_out(kernels: str) -> None:
    with_experts = make_trajectories([[(3, OWN)]], 1, routed_experts=True)
    without = make_trajectories([[(2, OWN)]], 2)
    config, layout = RolloutsCollatorConfig(), ParallelLayout(data=1)
    blocks = [FlatTurns.of(with_experts), FlatTurns.of(without)]
    batch = FastRolloutsCollator(config, 9, layout, dirty_kernels(kernels)).collate_flat(blocks)
    assert "routed_experts" not in batch.tokens
    assert_batches_equal(batch, RolloutsCollator(config, 9, layout).collate_rollouts([*with_experts, *without]))


@given(st.lists(st.integers(1, OWN + 2), max_size=12))
def test_pieces_hold_every_block_once_in_order_and_join_small_ones_alone(tokens: list[int]) -> None:
    blocks = [FlatTurns.of(make_trajectories([[(0, count)]])) for count in tokens]
    pieces = [*collators._pieces(blocks)]
    assert [block for piece in pieces for block in piece] == blocks
    sizes = [[len(block.tokens) for block in piece] for piece in pieces]
    for piece in sizes:
        assert len(piece) == 1 or (max(piece) < OWN and sum(piece) <= MOST), sizes
    for piece, following in pairwise(sizes):
        assert max(piece[-1], following[0]) >= OWN or sum(piece) + following[0] > MOST, "they could have been one piece"
