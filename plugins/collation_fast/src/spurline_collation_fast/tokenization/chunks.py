"""Rows are cut into chunks, and the samples of a chunk are one block of flat arrays, not Python objects per row.

Place on the way: datasets as one line of rows -> slices and chunks -> encoder -> SampleBlock -> SampleCollector, in one
process or through a file that a slice worker writes. A block on disk is its arrays, raw and end to end; what the arrays
cannot say travels in its header.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from spurline.data.encoding import Dropped, Sample
from spurline.data.tokenization import SampleCollector


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


@dataclass(frozen=True)
class Count:
    """Rows that met one fate. reason: why they were left out; empty for samples cut to `max_length`."""

    reason: str
    count: int
    first_row: int


@dataclass(frozen=True)
class SampleBlock:
    """Usable samples of one dataset, end to end, and counts of the others.

    tokens: int32 [T]. loss_mask: uint8 [T]. lengths, rows: int64 [n]. num_rows: rows it was made of.
    """

    source: int
    num_rows: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    counts: tuple[Count, ...] = ()

    @classmethod
    def of_outcomes(cls, source: int, outcomes: Iterable[Sample | Dropped]) -> SampleBlock:
        """Outcomes of `RowEncoder`, in order."""
        outcomes = list(outcomes)
        samples = [outcome for outcome in outcomes if isinstance(outcome, Sample)]
        counts: dict[str, Count] = {}
        for outcome in outcomes:
            if isinstance(outcome, Dropped) or outcome.truncated:
                reason = outcome.reason if isinstance(outcome, Dropped) else ""
                seen = counts.get(reason, Count(reason, 0, outcome.row))
                counts[reason] = Count(reason, seen.count + 1, seen.first_row)
        return cls(
            source,
            len(outcomes),
            _joined([np.array(sample.tokens, dtype=np.int32) for sample in samples], np.int32),
            _joined([sample.loss_mask for sample in samples], np.uint8),
            np.array([len(sample.tokens) for sample in samples], dtype=np.int64),
            np.array([sample.row for sample in samples], dtype=np.int64),
            tuple(counts.values()),
        )

    def add_to(self, collector: SampleCollector) -> None:
        """Hand the samples and counts on; blocks come in the order of datasets and rows."""
        for item in self.counts:
            if item.reason:
                collector.count_dropped(self.source, item.reason, item.count, item.first_row)
            else:
                collector.count_truncated(self.source, item.count, item.first_row)
        if len(self.rows):
            collector.extend(self.source, self.tokens, self.loss_mask, self.lengths, self.rows)

    def write(self, file: BinaryIO) -> dict[str, Any]:
        """Append the arrays to the file; returns the JSON-able header that `read` needs."""
        for array in (self.tokens, self.loss_mask, self.lengths, self.rows):
            file.write(np.ascontiguousarray(array).data)
        return {
            "source": self.source,
            "num_rows": self.num_rows,
            "num_tokens": len(self.tokens),
            "num_samples": len(self.rows),
            "counts": [[item.reason, item.count, item.first_row] for item in self.counts],
        }

    @classmethod
    def read(cls, file: BinaryIO, header: Mapping[str, Any]) -> SampleBlock:
        """The next block of the file, by the header that writing it returned."""
        num_tokens, num_samples = header["num_tokens"], header["num_samples"]
        block = cls(
            header["source"],
            header["num_rows"],
            np.fromfile(file, np.int32, num_tokens),
            np.fromfile(file, np.uint8, num_tokens),
            np.fromfile(file, np.int64, num_samples),
            np.fromfile(file, np.int64, num_samples),
            tuple(Count(*item) for item in header["counts"]),
        )
        assert len(block.rows) == num_samples, f"{len(block.rows)} of {num_samples} samples in the file of a worker"
        return block


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
