"""The innermost loops of collation, and the one place that chooses how they run.

With numba they are `loops.py` and `fitting.py`, compiled (`compiled.py`); without it, `slices.py` gives the same
results by numpy slices and core's plain packing. What each one must do is said in `loops.py`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Plan = Callable[[NDArray[np.int64], int, int, str], tuple[NDArray[np.int64], NDArray[np.int64]]]


@dataclass(frozen=True)
class Kernels:
    """One implementation of the loops. write_*: see `loops.py`. plan_rows: see `packing.plan_rows`."""

    name: str
    write_tokens: Callable[..., None]
    write_segment_ids: Callable[..., None]
    write_positions: Callable[..., None]
    write_values: Callable[..., None]
    plan_rows: Plan


@functools.cache
def kernels_named(name: str) -> Kernels:
    """`numba` or `numpy`. Raises ImportError where numba is not installed."""
    module: Any = importlib.import_module({"numba": f"{__name__}.compiled", "numpy": f"{__name__}.slices"}[name])
    return module.KERNELS


@functools.cache
def best_kernels() -> Kernels:
    """The compiled ones where numba is installed, else the numpy ones."""
    try:
        return kernels_named("numba")
    except ModuleNotFoundError as error:
        # Only numba's absence is expected; a broken numba must not quietly become a slow run.
        if error.name != "numba":
            raise
        return kernels_named("numpy")
