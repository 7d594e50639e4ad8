"""Cut the rows of several datasets into chunks that are encoded together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Chunk:
    """Rows [start, stop) of dataset number `source`, encoded together."""

    source: int
    start: int
    stop: int

    @property
    def rows(self) -> range:
        return range(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


class RowLine:
    """Rows of several datasets, one dataset after another, numbered from 0. sizes: rows of each dataset."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = list(accumulate(sizes))
        self._begins = [end - size for end, size in zip(self._ends, sizes, strict=True)]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def chunks(self, rows: range, size: Callable[[], int]) -> Iterator[Chunk]:
        """Yield the rows as chunks of at most `size`, asked for each, within one dataset each, in order."""
        position = rows.start
        while position < rows.stop:
            source = bisect_right(self._ends, position)
            row = position - self._begins[source]
            stop = min(row + size(), self._ends[source] - self._begins[source], row + rows.stop - position)
            yield Chunk(source, row, stop)
            position += stop - row
