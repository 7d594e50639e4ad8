"""Packing algorithms and the spreading of rows over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.data.collators.packing import (
    PackingAlgorithm,
    first_fit_decreasing,
    multifit,
    pack,
    spread_over_ranks,
    straggler_factor,
)

lengths_strategy = st.lists(st.integers(1, 50), max_size=60)


def test_ties_go_to_the_higher_position_first() -> None:
    assert first_fit_decreasing([5, 5, 5], 10) == [[2, 1], [0]]


@given(lengths=lengths_strategy, ranks=st.integers(1, 8))
def test_spreading_gives_each_rank_as_many_rows_and_leaves_none_empty_needlessly(
    lengths: list[int], ranks: int
) -> None:
    packing = first_fit_decreasing(lengths, 50)
    rows = spread_over_ranks(packing, ranks)
    assert len(rows) % ranks == 0
    assert len(rows) >= ranks
    assert len(rows) < max(len(packing), 1) + ranks
    assert sorted(position for row in rows for position in row) == list(range(len(lengths)))
    assert rows.count([]) == max(0, len(rows) - len(lengths))


def test_rows_go_round_robin_to_ranks_and_lie_rank_by_rank() -> None:
    assert spread_over_ranks([[0], [1], [2], [3]], 2) == [[0], [2], [1], [3]]


@pytest.mark.parametrize("algorithm", ["ffd", "multifit"])
@given(lengths=lengths_strategy, ranks=st.integers(1, 8))
def test_every_algorithm_packs_each_sample_once_within_capacity(
    algorithm: PackingAlgorithm, lengths: list[int], ranks: int
) -> None:
    rows = pack(lengths, 50, ranks, algorithm)
    assert sorted(position for row in rows for position in row) == list(range(len(lengths)))
    assert all(sum(lengths[position] for position in row) <= 50 for row in rows)
    assert len(rows) % ranks == 0


@given(lengths=lengths_strategy, ranks=st.integers(1, 8))
def test_multifit_needs_no_more_rows_than_first_fit_rounded_up_to_the_ranks(lengths: list[int], ranks: int) -> None:
    assert len(pack(lengths, 50, ranks, "multifit")) == len(pack(lengths, 50, ranks, "ffd"))


def test_multifit_evens_rows_out_over_the_ranks() -> None:
    lengths = [5] * 12
    assert [len(row) for row in first_fit_decreasing(lengths, 50)] == [10, 2]
    assert [len(row) for row in multifit(lengths, 50, 4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("seed", range(3))
def test_multifit_leaves_no_rank_a_thousandth_behind(seed: int) -> None:
    draw = np.random.default_rng(seed).lognormal(np.log(500) - 0.9**2 / 2, 0.9, 1024)
    lengths = draw.astype(int).clip(16, 4096).tolist()
    used = [sum(lengths[position] for position in row) for row in pack(lengths, 8192, 8, "multifit")]
    assert straggler_factor(used, 8) <= 1.001
