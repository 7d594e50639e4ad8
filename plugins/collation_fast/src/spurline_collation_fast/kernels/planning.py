"""Plan packed rows: which samples share a row, and where in it.

Tables and choices are made here, in Python; the loops over samples are compiled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spurline.data.collators.packing import PackingAlgorithm, even_capacities
from spurline_collation_fast.kernels import compiled

Table = NDArray[np.int64]


def pack_rows(
    lengths: Table, align_to: int, capacity: int, num_ranks: int, algorithm: PackingAlgorithm
) -> tuple[Table, Table, Table, int, float]:
    """Pack samples into rows exactly as core's `packing.pack` does with the aligned lengths.

    Args:
        lengths: Tokens of each sample; none is above `capacity` when rounded up to `align_to`.
        align_to: Samples begin at multiples of this.
        capacity: Tokens that a row may hold.
        num_ranks: The number of rows R is a multiple of this; rows lie rank by rank.
        algorithm: How samples are chosen for rows.

    Returns:
        Sample positions row by row [S], row offsets into them [R + 1], the column at which each segment begins [S],
        the tokens of the fullest row, and the straggler factor.
    """
    aligned = lengths if align_to == 1 else -(-lengths // align_to) * align_to
    order, row_of, scratch = (np.empty(len(lengths), np.int64) for _ in range(3))
    compiled.longest_first(aligned, np.zeros(int(aligned.max(initial=0)) + 2, np.int64), order)
    if algorithm == "ffd":
        num_rows = compiled.first_fit(aligned, order, row_of, _empty_rows(_most_rows(aligned, capacity), capacity))
    elif algorithm == "bfd":
        num_rows = compiled.best_fit(aligned, order, capacity, row_of, scratch)
    else:
        num_rows = _fit_evenly(aligned, order, capacity, num_ranks, row_of)
    num_all = _rounded(num_rows, num_ranks)
    counts, donors, last, free = np.zeros((4, num_all), np.int64)
    compiled.fill_missing_rows(order, row_of, num_rows, counts, donors, last, scratch)
    positions, columns = (np.empty(len(lengths), np.int64) for _ in range(2))
    row_offsets = np.empty(num_all + 1, np.int64)
    compiled.list_rows(order, row_of, counts, num_ranks, row_offsets, free, positions)
    longest, straggler = compiled.place_in_rows(aligned, positions, row_offsets, num_ranks, columns)
    return positions, row_offsets, columns, longest, straggler


def _rounded(num_rows: int, num_ranks: int) -> int:
    return max(num_ranks, -(-num_rows // num_ranks) * num_ranks)


def _most_rows(lengths: Table, capacity: int) -> int:
    """Return the most rows that first fit can open.

    Any two rows together hold more than `capacity`: otherwise the first sample of the later row would have fitted into
    the earlier one.
    """
    return min(len(lengths), 2 * int(lengths.sum()) // capacity + 1)


def _empty_rows(num_rows: int, capacity: int) -> Table:
    """Return the tree of `first_fit`, with a leaf for each row."""
    leaves = 1 << max(0, num_rows - 1).bit_length()
    return np.full(2 * leaves, capacity, np.int64)


def _fit_evenly(lengths: Table, order: Table, capacity: int, num_ranks: int, row_of: Table) -> int:
    """Do what core's `packing.multifit` does; return the number of rows."""
    total, longest = int(lengths.sum()), int(lengths.max(initial=0))
    num_rows = _rounded(-(-total // capacity), num_ranks)
    while True:
        for lower in even_capacities(max(-(-total // num_rows), longest), capacity):
            at_most = num_rows if lower < capacity else _most_rows(lengths, capacity)
            needed = int(compiled.first_fit(lengths, order, row_of, _empty_rows(at_most, lower)))
            if needed <= num_rows:
                return needed
        num_rows = _rounded(needed, num_ranks)
