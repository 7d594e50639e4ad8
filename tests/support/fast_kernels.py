"""Kernels of collation_fast under test: every column is dirty before a kernel writes it, as reused memory is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spurline_collation_fast.kernels import Kernels, kernels_named

WRITERS = ("write_tokens", "write_segment_ids", "write_positions", "write_values")


def dirty_first(kernels: Kernels) -> Kernels:
    """The same kernels, writing into columns that hold nothing but 77."""

    def dirtied(write: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            arguments[-1].fill(77)
            write(*arguments)

        return call

    return replace(kernels, **{name: dirtied(getattr(kernels, name)) for name in WRITERS})


def dirty_kernels(name: str) -> Kernels:
    """`numba` or `numpy` kernels, writing into dirty columns."""
    return dirty_first(kernels_named(name))
