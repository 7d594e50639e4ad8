"""Compiled planning equals core's plain Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.collators.packing import PackingAlgorithm, pack, straggler_factor
from spurline_collation_fast.kernels import ALGORITHMS, kernels_named


def planned(
    kernels: str, lengths: list[int], capacity: int, ranks: int, algorithm: PackingAlgorithm
) -> tuple[list[list[int]], list[list[int]], int, float]:
    pack_rows = kernels_named(kernels).pack_rows
    positions, offsets, columns, longest, straggler = pack_rows(
        np.array(lengths, np.int64), 1, capacity, ranks, ALGORITHMS.index(algorithm)
    )
    assert positions.dtype == offsets.dtype == columns.dtype == np.int64
    rows, starts = ([part.tolist() for part in np.split(table, offsets[1:-1])] for table in (positions, columns))
    return rows, starts, longest, straggler


def expected(
    lengths: list[int], capacity: int, ranks: int, algorithm: PackingAlgorithm
) -> tuple[list[list[int]], list[list[int]], int, float]:
    rows = pack(lengths, capacity, ranks, algorithm)
    ends = [list(itertools.accumulate((lengths[position] for position in row), initial=0)) for row in rows]
    used = [row[-1] for row in ends]
    return rows, [row[:-1] for row in ends], max(used), straggler_factor(used, ranks)


@pytest.mark.parametrize("kernels", ["numba", "numpy"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=st.lists(st.integers(0, 50), max_size=80), capacity=st.integers(50, 130), ranks=st.integers(1, 9))
@settings(max_examples=150)
def test_rows_equal_the_reference(
    kernels: str, algorithm: PackingAlgorithm, lengths: list[int], capacity: int, ranks: int
) -> None:
    assert planned(kernels, lengths, capacity, ranks, algorithm) == expected(lengths, capacity, ranks, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("capacity", [8192, 1 << 16, 100_000])
def test_rows_of_a_large_batch_equal_the_reference(algorithm: PackingAlgorithm, capacity: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 8193, 1500).tolist()
    assert planned("numba", lengths, capacity, 8, algorithm) == expected(lengths, capacity, 8, algorithm)
