"""A column with a variable number of values per row, kept in two flat arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Ragged:
    """A ragged column.

    values: [V], any dtype (object for strings). offsets: int64 [R + 1]; row r is values[offsets[r]:offsets[r + 1]].
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert len(self.offsets) >= 1, "offsets must have one entry more than there are rows"
        assert int(self.offsets[-1]) == len(self.values), (int(self.offsets[-1]), len(self.values))

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any]], dtype: Any) -> Ragged:
        """Build from one sequence per row."""
        values = np.empty(sum(len(row) for row in rows), dtype=dtype)
        position = 0
        for row in rows:
            for value in row:
                values[position] = value
                position += 1
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def counts(self) -> NDArray[np.int64]:
        """Number of values in each row, int64 [R]."""
        return np.diff(self.offsets)

    def take(self, rows: NDArray[np.int64]) -> Ragged:
        """The chosen rows in that order."""
        source, offsets = self._selection(rows)
        return Ragged(self.values[source], offsets)

    def append_empty(self, count: int) -> Ragged:
        """The same rows and `count` rows without values after them."""
        return Ragged(self.values, self._longer_offsets(count))

    def _selection(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the values of these rows lie, and the offsets they get."""
        counts = self.counts()[rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        return np.arange(int(offsets[-1])) + np.repeat(self.offsets[rows] - offsets[:-1], counts), offsets

    def _longer_offsets(self, count: int) -> NDArray[np.int64]:
        return np.concatenate([self.offsets, np.full(count, self.offsets[-1])])

    @staticmethod
    def concatenate(parts: Iterable[Ragged]) -> Ragged:
        """The rows of all parts, one part after another."""
        columns = list(parts)
        counts = np.concatenate([column.counts() for column in columns])
        offsets = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        return Ragged(np.concatenate([column.values for column in columns]), offsets)


class LazyRagged(Ragged):
    """A ragged column whose values are made when somebody first reads them.

    For values that most batches never need, such as the names of samples. Selecting rows does not read them either;
    pickling does. compute: what makes all values; it must not depend on anything that changes later.
    """

    def __init__(self, compute: Callable[[], NDArray[Any]], offsets: NDArray[np.int64]) -> None:
        # Frozen, so fields are set past __setattr__; no check of the number of values, which are not there yet.
        self.__dict__.update(_compute=compute, offsets=offsets)

    @functools.cached_property
    def values(self) -> NDArray[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        values = self.__dict__["_compute"]()
        assert int(self.offsets[-1]) == len(values), (int(self.offsets[-1]), len(values))
        return values

    def take(self, rows: NDArray[np.int64]) -> Ragged:
        source, offsets = self._selection(rows)
        return LazyRagged(lambda: self.values[source], offsets)

    def append_empty(self, count: int) -> Ragged:
        return LazyRagged(lambda: self.values, self._longer_offsets(count))

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged, (self.values, self.offsets)
