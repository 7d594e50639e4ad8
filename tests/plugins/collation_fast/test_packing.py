"""Compiled planning equals core's plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.packing import PackingAlgorithm, pack
from spurline_collation_fast.kernels import kernels_named

ALGORITHMS: tuple[PackingAlgorithm, ...] = ("ffd", "bfd", "multifit")


def planned(kernels: str, lengths: list[int], capacity: int, ranks: int, algorithm: str) -> list[list[int]]:
    plan = kernels_named(kernels).plan_rows
    positions, offsets = plan(np.array(lengths, np.int64), capacity, ranks, algorithm)
    assert positions.dtype == offsets.dtype == np.int64
    return [part.tolist() for part in np.split(positions, offsets[1:-1])]


@pytest.mark.parametrize("kernels", ["numba", "numpy"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=st.lists(st.integers(0, 50), max_size=80), capacity=st.integers(50, 130), ranks=st.integers(1, 9))
@settings(max_examples=150)
def test_rows_equal_the_reference(
    kernels: str, algorithm: PackingAlgorithm, lengths: list[int], capacity: int, ranks: int
) -> None:
    assert planned(kernels, lengths, capacity, ranks, algorithm) == pack(lengths, capacity, ranks, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("capacity", [8192, 1 << 16, 100_000])
def test_rows_of_a_large_batch_equal_the_reference(algorithm: PackingAlgorithm, capacity: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 8193, 1500).tolist()
    assert planned("numba", lengths, capacity, 8, algorithm) == pack(lengths, capacity, 8, algorithm)
