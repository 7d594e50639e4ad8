"""The innermost loops of collation, and the one place that chooses how they run.

With numba they are `loops.py` and those that `planning.py` calls from `fitting.py`, compiled (`compiled.py`); without
it, `slices.py` gives the same results by numpy slices and core's plain packing. What each one must do is said in
`loops.py` and `planning.py`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.collators.packing import PackingAlgorithm

Table = NDArray[np.int64]
PackRows = Callable[[Table, int, int, int, int], tuple[Table, Table, Table, int, float]]

ALGORITHMS: tuple[PackingAlgorithm, ...] = ("ffd", "bfd", "multifit")
"""Compiled code knows them by their place here."""


@dataclass(frozen=True)
class Kernels:
    """One implementation of the loops. write_*: see `loops.py`. pack_rows: see `planning.py`."""

    name: str
    write_rows: Callable[..., int]
    write_values: Callable[..., None]
    pack_rows: PackRows


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
