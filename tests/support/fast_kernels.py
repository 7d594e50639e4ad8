"""Kernels of collation_fast under test: every column is dirty before a kernel writes it, as reused memory is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from spurline_collation_fast.kernels import Kernels, kernels_named


def dirty_first(kernels: Kernels) -> Kernels:
    """The same kernels, writing into columns that hold nothing but 77; rows are written in and past the caches."""

    def write_rows(*arguments: Any) -> int:
        *tables, past_caches, input_ids, segment_ids, position_ids = arguments
        columns = (input_ids, segment_ids, position_ids)
        others = [np.full_like(column, 77) for column in columns]
        for column in columns:
            column.fill(77)
        num_tokens = kernels.write_rows(*tables, past_caches, *columns)
        assert kernels.write_rows(*tables, not past_caches, *others) == num_tokens
        for column, other in zip(columns, others, strict=True):
            assert np.array_equal(column, other), "what is written depends on how"
        return num_tokens

    def write_values(*arguments: Any) -> None:
        arguments[-1].fill(77)
        kernels.write_values(*arguments)

    return replace(kernels, write_rows=write_rows, write_values=write_values)


def dirty_kernels(name: str) -> Kernels:
    """`numba` or `numpy` kernels, writing into dirty columns."""
    return dirty_first(kernels_named(name))
