"""The rows of all datasets as one line of numbers, and how it is cut into slices and chunks.

Place on the way: datasets -> ranges of rows -> whoever encodes them (this process or a slice worker). Knows numbers of
rows only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


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

    def chunks(self, rows: range, size: int) -> Iterator[Chunk]:
        """The rows as chunks of at most `size`, each within one dataset, in order."""
        position = rows.start
        while position < rows.stop:
            source, row = self.place(position)
            stop = min(row + size, self._ends[source] - self._begins[source], row + rows.stop - position)
            yield Chunk(source, row, stop)
            position += stop - row

    def place(self, position: int) -> tuple[int, int]:
        """Dataset, and row within it, of the row at this place of the line."""
        source = bisect_right(self._ends, position)
        return source, position - self._begins[source]


def even_slices(rows: range, num_slices: int) -> list[range]:
    """Cut into slices without a gap, whose sizes differ by at most one row."""
    cuts = [rows.start + len(rows) * number // num_slices for number in range(num_slices + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]
