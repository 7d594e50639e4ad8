"""Cut rows into chunks, and pass the block of samples made of a chunk through a file.

Place on the way: datasets as one line of rows -> slices and chunks -> encoder -> SampleBlock -> SampleCollector, in
one process or through a file that a slice worker writes. A block on disk is its arrays, raw and end to end; what they
cannot say travels in its header.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, BinaryIO

import numpy as np

from spurline.data.token_store import Count, SampleBlock


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
        """The rows as chunks of at most `size`, asked for each, within one dataset each, in order."""
        position = rows.start
        while position < rows.stop:
            source, row = self.place(position)
            stop = min(row + size(), self._ends[source] - self._begins[source], row + rows.stop - position)
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


def write_block(block: SampleBlock, file: BinaryIO) -> dict[str, Any]:
    """Append the arrays to the file; returns the JSON-able header that `read_block` needs."""
    for array in (block.tokens, block.loss_mask, block.lengths, block.rows):
        file.write(np.ascontiguousarray(array).data)
    return {
        "source": block.source,
        "num_rows": block.num_rows,
        "num_tokens": len(block.tokens),
        "num_samples": len(block.rows),
        "counts": [[item.reason, item.count, item.first_row, item.kept] for item in block.counts],
    }


def read_block(file: BinaryIO, header: Mapping[str, Any]) -> SampleBlock:
    """The next block of the file, by the header that writing it returned."""
    num_tokens, num_samples = header["num_tokens"], header["num_samples"]
    block = SampleBlock(
        header["source"],
        tokens=np.fromfile(file, np.int32, num_tokens),
        loss_mask=np.fromfile(file, np.uint8, num_tokens),
        lengths=np.fromfile(file, np.int64, num_samples),
        rows=np.fromfile(file, np.int64, num_samples),
        num_rows=header["num_rows"],
        counts=tuple(Count(*item) for item in header["counts"]),
    )
    assert len(block.rows) == num_samples, f"{len(block.rows)} of {num_samples} samples in the file of a worker"
    return block
