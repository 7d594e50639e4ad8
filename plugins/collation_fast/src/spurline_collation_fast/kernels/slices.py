"""The same results as the compiled loops, where numba is not installed: numpy slices, and core's plain packing.

Tables are int64, columns [R, L]; what each argument is, and what comes back, is said in `loops.py` and
`planning.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.collators.packing import pack, straggler_factor
from spurline_collation_fast.kernels import ALGORITHMS, Kernels, Table


def write_rows(
    tokens: NDArray[Any],
    begins: Table,
    lengths: Table,
    positions: Table,
    columns: Table,
    row_offsets: Table,
    pad: int,
    input_ids: NDArray[Any],
    segment_ids: NDArray[Any],
    position_ids: NDArray[Any],
) -> int:
    """See `loops.write_rows`."""
    input_ids.fill(pad)
    segment_ids.fill(0)
    position_ids.fill(0)
    ids, numbers, places = input_ids.reshape(-1), segment_ids.reshape(-1), position_ids.reshape(-1)
    ascending = np.arange(input_ids.shape[1], dtype=position_ids.dtype)
    taken = lengths[positions]
    starts = _starts(columns, row_offsets, input_ids)
    stops = starts + taken
    number = np.arange(1, len(positions) + 1) - np.repeat(row_offsets[:-1], np.diff(row_offsets))
    tables = (begins[positions], taken, starts, stops, number)
    for begin, length, start, stop, segment in zip(*(table.tolist() for table in tables), strict=True):
        ids[start:stop] = tokens[begin : begin + length]
        numbers[start:stop] = segment
        places[start:stop] = ascending[:length]
    return int(taken.sum())


def write_values(
    values: NDArray[Any],
    begins: Table,
    skips: Table,
    lengths: Table,
    positions: Table,
    columns: Table,
    row_offsets: Table,
    out: NDArray[Any],
) -> None:
    """See `loops.write_values`."""
    out.fill(0)
    flat = out.reshape(-1)
    taken = (lengths - skips)[positions]
    starts = _starts(columns + skips[positions], row_offsets, out)
    tables = (begins[positions], taken, starts)
    for begin, length, start in zip(*(table.tolist() for table in tables), strict=True):
        flat[start : start + length] = values[begin : begin + length]


def pack_rows(
    lengths: Table, align_to: int, capacity: int, num_ranks: int, algorithm: int
) -> tuple[Table, Table, Table, int, float]:
    """See `planning.pack_rows`."""
    aligned = (-(-lengths // align_to) * align_to).tolist()
    rows = pack(aligned, capacity, num_ranks, ALGORITHMS[algorithm])
    row_offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=row_offsets[1:])
    ends = [list(itertools.accumulate((aligned[position] for position in row), initial=0)) for row in rows]
    columns = np.array([end for row in ends for end in row[:-1]], np.int64)
    used = [row[-1] for row in ends]
    positions = np.array([position for row in rows for position in row], np.int64)
    return positions, row_offsets, columns, max(used), straggler_factor(used, num_ranks)


def _starts(columns: Table, row_offsets: Table, out: NDArray[Any]) -> Table:
    """Where segments begin in the flat column."""
    return np.repeat(np.arange(out.shape[0]), np.diff(row_offsets)) * out.shape[1] + columns


KERNELS = Kernels("numpy", write_rows, write_values, pack_rows)
