"""Which samples share a row, and where in it: the plan of packed rows, by loops that may be compiled.

Loops that choose among others, and the tables they work on, are here, where compiling them would only cost time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spurline.data.collators.packing import even_capacities
from spurline_collation_fast.kernels import Table


@dataclass(frozen=True)
class FittingLoops:
    """The functions of `fitting.py`, each compiled or not."""

    longest_first: Callable[[Table, Table, Table], None]
    first_fit: Callable[[Table, Table, Table, Table], int]
    best_fit: Callable[[Table, Table, int, Table, Table], int]
    fill_missing_rows: Callable[[Table, Table, int, Table, Table, Table, Table], None]
    list_rows: Callable[[Table, Table, Table, int, Table, Table, Table], None]
    place_in_rows: Callable[[Table, Table, Table, int, Table], tuple[int, float]]


def pack_rows(
    loops: FittingLoops, lengths: Table, align_to: int, capacity: int, num_ranks: int, algorithm: int
) -> tuple[Table, Table, Table, int, float]:
    """Equal to core's `packing.pack` of the aligned lengths.

    lengths: int64 [n], none above `capacity` when rounded up to `align_to`. algorithm: place in `ALGORITHMS`.
    Returns sample positions int64 [S] row by row; row offsets into them, int64 [R + 1], R a multiple of `num_ranks`,
    rows rank by rank; the column at which each segment begins, int64 [S]; the tokens of the fullest row; and the
    straggler factor.
    """
    aligned = lengths if align_to == 1 else -(-lengths // align_to) * align_to
    order, row_of, scratch = (np.empty(len(lengths), np.int64) for _ in range(3))
    loops.longest_first(aligned, np.zeros(int(aligned.max(initial=0)) + 2, np.int64), order)
    if algorithm == 0:
        num_rows = loops.first_fit(aligned, order, row_of, _room(_most_rows(aligned, capacity), capacity))
    elif algorithm == 1:
        num_rows = loops.best_fit(aligned, order, capacity, row_of, scratch)
    else:
        num_rows = _fit_evenly(loops, aligned, order, capacity, num_ranks, row_of)
    num_all = _rounded(num_rows, num_ranks)
    counts, donors, last, free = np.zeros((4, num_all), np.int64)
    loops.fill_missing_rows(order, row_of, num_rows, counts, donors, last, scratch)
    positions, columns = (np.empty(len(lengths), np.int64) for _ in range(2))
    row_offsets = np.empty(num_all + 1, np.int64)
    loops.list_rows(order, row_of, counts, num_ranks, row_offsets, free, positions)
    longest, straggler = loops.place_in_rows(aligned, positions, row_offsets, num_ranks, columns)
    return positions, row_offsets, columns, longest, straggler


def _rounded(num_rows: int, num_ranks: int) -> int:
    return max(num_ranks, -(-num_rows // num_ranks) * num_ranks)


def _most_rows(lengths: Table, capacity: int) -> int:
    """Return the most rows that first fit can open.

    Any two rows together hold more than `capacity`: otherwise the first sample of the later row would have fitted into
    the earlier one.
    """
    return min(len(lengths), 2 * int(lengths.sum()) // capacity + 1)


def _room(num_rows: int, capacity: int) -> Table:
    """The tree of `first_fit`, with a leaf for each row, and all rows empty."""
    leaves = 1 << max(0, num_rows - 1).bit_length()
    return np.full(2 * leaves, capacity, np.int64)


def _fit_evenly(loops: FittingLoops, lengths: Table, order: Table, capacity: int, num_ranks: int, row_of: Table) -> int:
    """Core's `packing.multifit`: the row of each sample into `row_of`; returns the number of rows."""
    total, longest = int(lengths.sum()), int(lengths.max(initial=0))
    num_rows = _rounded(-(-total // capacity), num_ranks)
    while True:
        for lower in even_capacities(max(-(-total // num_rows), longest), capacity):
            at_most = num_rows if lower < capacity else _most_rows(lengths, capacity)
            needed = int(loops.first_fit(lengths, order, row_of, _room(at_most, lower)))
            if needed <= num_rows:
                return needed
        num_rows = _rounded(needed, num_ranks)
