"""The same results as the compiled loops, where numba is not installed: numpy slices, and core's plain packing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.packing import pack
from spurline_collation_fast.kernels import Kernels

Table = NDArray[np.int64]


def write_tokens(
    tokens: NDArray[Any], begins: Table, lengths: Table, columns: Table, row_offsets: Table, pad: int, out: NDArray[Any]
) -> None:
    out.fill(pad)
    flat = out.reshape(-1)
    for begin, length, start in zip(begins.tolist(), lengths.tolist(), _starts(columns, row_offsets, out), strict=True):
        flat[start : start + length] = tokens[begin : begin + length]


def write_segment_ids(lengths: Table, columns: Table, row_offsets: Table, clear: bool, out: NDArray[Any]) -> None:
    out.fill(0)
    flat = out.reshape(-1)
    counts = np.diff(row_offsets)
    numbers = np.arange(1, len(lengths) + 1) - np.repeat(row_offsets[:-1], counts)
    for number, length, start in zip(
        numbers.tolist(), lengths.tolist(), _starts(columns, row_offsets, out), strict=True
    ):
        flat[start : start + length] = number


def write_positions(lengths: Table, columns: Table, row_offsets: Table, clear: bool, out: NDArray[Any]) -> None:
    out.fill(0)
    flat = out.reshape(-1)
    ascending = np.arange(out.shape[1], dtype=out.dtype)
    for length, start in zip(lengths.tolist(), _starts(columns, row_offsets, out), strict=True):
        flat[start : start + length] = ascending[:length]


def write_values(
    values: NDArray[Any],
    begins: Table,
    skips: Table,
    lengths: Table,
    columns: Table,
    row_offsets: Table,
    clear: bool,
    out: NDArray[Any],
) -> None:
    out.fill(0)
    flat = out.reshape(-1)
    starts = _starts(columns + skips, row_offsets, out)
    for begin, length, start in zip(begins.tolist(), (lengths - skips).tolist(), starts, strict=True):
        flat[start : start + length] = values[begin : begin + length]


def plan_rows(lengths: Table, capacity: int, num_ranks: int, algorithm: Any) -> tuple[Table, Table]:
    rows = pack(lengths.tolist(), capacity, num_ranks, algorithm)
    row_offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=row_offsets[1:])
    return np.array([position for row in rows for position in row], np.int64), row_offsets


def _starts(columns: Table, row_offsets: Table, out: NDArray[Any]) -> list[int]:
    """Where segments begin in the flat column."""
    rows = np.repeat(np.arange(out.shape[0]), np.diff(row_offsets))
    return (rows * out.shape[1] + columns).tolist()


KERNELS = Kernels("numpy", write_tokens, write_segment_ids, write_positions, write_values, plan_rows)
