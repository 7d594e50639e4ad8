"""Kernels of collation_fast under test: every column is dirty before a kernel writes it, as reused memory is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spurline_collation_fast.kernels import Kernels, kernels_named


def dirty_first(kernels: Kernels) -> Kernels:
    """The same kernels, writing into columns that hold nothing but 77."""

    def write_rows(*arguments: Any) -> int:
        for column in arguments[-3:]:
            column.fill(77)
        return kernels.write_rows(*arguments)

    def write_values(*arguments: Any) -> None:
        arguments[-1].fill(77)
        kernels.write_values(*arguments)

    return replace(kernels, write_rows=write_rows, write_values=write_values)


def dirty_kernels(name: str) -> Kernels:
    """`numba` or `numpy` kernels, writing into dirty columns."""
    return dirty_first(kernels_named(name))
