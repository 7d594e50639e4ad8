"""Ragged columns of a batch whose values are seldom read, such as the names of samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import Ragged


class LazyRagged(Ragged):
    """A ragged column whose values are computed when they are first read.

    It is for values that are seldom needed, such as the names of samples. Selecting rows does not compute the values,
    but pickling does.

    Args:
        compute: Returns all values. Every call must return the same values.
        offsets: int64 [R + 1], as in `Ragged`.
    """

    def __init__(self, compute: Callable[[], NDArray[Any]], offsets: NDArray[np.int64]) -> None:
        # The dataclass is frozen, so set its fields in __dict__.
        self.__dict__.update(_compute=compute, offsets=offsets)

    @functools.cached_property
    def values(self) -> NDArray[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        values = self.__dict__["_compute"]()
        assert int(self.offsets[-1]) == len(values), (int(self.offsets[-1]), len(values))
        return values

    def derived(self, compute: Callable[[], NDArray[Any]], offsets: NDArray[np.int64]) -> Ragged:
        return LazyRagged(compute, offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged, (self.values, self.offsets)
