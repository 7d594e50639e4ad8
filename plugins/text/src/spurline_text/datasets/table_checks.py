"""Are the tables in files of others what they seem, before a library makes rows of them?

A small file may stand for rows without end: values that are compressed, or written once and referred to by all rows.
Offsets that point anywhere are no error to a library that maps a file. What is looked at here is never expanded.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from spurline.errors import DataError
from spurline_text.configs import TableLimits

_ALWAYS_ALLOWED_BYTES = 4 << 30
"""A table up to this size fits everywhere, however small its file is."""
_BYTES_AT_ONCE = 16 << 20
_FEWEST_ROWS_AT_ONCE = 128
_MOST_ROWS_AT_ONCE = 4096


def open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    """The file, whose columns that hold each value once are read so; `to_pylist` gives the same rows."""
    with pyarrow.parquet.ParquetFile(path) as file:
        shared = {
            column.path_in_schema
            for group in range(file.num_row_groups)
            for column in _columns_of(file.metadata.row_group(group))
            if column.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in name for name in column.encodings)
        }
    return pyarrow.parquet.ParquetFile(path, read_dictionary=sorted(shared))


def batches_of(file: pyarrow.parquet.ParquetFile, groups: Iterable[int]) -> Iterator[pyarrow.RecordBatch]:
    """Rows of these row groups, in order, some at a time: many, as each batch has a copy of the values held once."""
    for group in groups:
        facts = file.metadata.row_group(group)
        rows = _BYTES_AT_ONCE * facts.num_rows // max(1, facts.total_byte_size)
        rows = min(max(rows, _FEWEST_ROWS_AT_ONCE), _MOST_ROWS_AT_ONCE)
        # One after another: the library cannot join values of two groups that are held once each.
        yield from file.iter_batches(rows, row_groups=[group])


def check_parquet(path: Path, limits: TableLimits) -> None:
    """Raise DataError for a table that is many times as large as its file, or has a row that no row is as large as.

    Reads the whole file, some rows at a time.
    """
    with open_parquet(path) as file:
        for group in range(file.num_row_groups):
            facts = file.metadata.row_group(group)
            if facts.total_byte_size > limits.max_row_bytes * max(1, facts.num_rows):
                raise limits.too_large_row(f"{path} row group {group}")
        allowed = max(_ALWAYS_ALLOWED_BYTES, limits.max_expansion * path.stat().st_size)
        if _bytes_at_least(file) > allowed:
            raise _too_large_table(path, allowed, limits)
        size = row = 0
        for batch in batches_of(file, range(file.num_row_groups)):
            size += check_rows(batch, path, row, limits)
            row += len(batch)
            if size > allowed:
                raise _too_large_table(path, allowed, limits)


def _bytes_at_least(file: pyarrow.parquet.ParquetFile) -> int:
    """Of the table, as its description has it: of values that have all the same size."""
    columns = (column for group in range(file.num_row_groups) for column in _columns_of(file.metadata.row_group(group)))
    return sum(_VALUE_BYTES.get(column.physical_type, 0) * column.num_values for column in columns)


_VALUE_BYTES = {"INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


def _too_large_table(path: Path, allowed: int, limits: TableLimits) -> DataError:
    return DataError(
        f"{path}: stands for a table of more than {allowed:,} bytes; it may have {limits.max_expansion:,} times the "
        "bytes of its file, and files that go beyond are made to fill memory and disk. If its rows are what you want "
        "to train on, raise max_expansion of this dataset."
    )


def check_rows(batch: pyarrow.RecordBatch, path: Path, first: int, limits: TableLimits) -> int:
    """Bytes of the rows of a batch. Raises DataError naming one that is too large. first: number of the first row."""
    size = sum(map(_num_bytes, batch.columns))
    if size > limits.max_row_bytes:
        if len(batch) == 1:
            raise limits.too_large_row(f"{path} row {first}")
        half = len(batch) // 2
        check_rows(batch.slice(0, half), path, first, limits)
        check_rows(batch.slice(half), path, first + half, limits)
    return size


def check_csv(path: Path, limits: TableLimits) -> None:
    """Raise DataError naming the line where a row begins or ends that is too large. Reads a large file as a whole."""
    if path.stat().st_size <= limits.max_row_bytes:
        return
    before = csv.field_size_limit(limits.max_row_bytes)
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_lines(file, path, limits))
            for row in reader:
                if sum(map(len, row)) > limits.max_row_bytes:
                    raise limits.too_large_row(f"{path}:{reader.line_num}")
                number = reader.line_num
    except (UnicodeDecodeError, csv.Error) as error:
        if "field limit" in str(error):
            raise limits.too_large_row(f"{path}:{number + 1}") from error
        raise DataError(f"{path}:{number + 1}: not valid CSV in UTF-8: {error}.") from error
    finally:
        csv.field_size_limit(before)


def csv_header(path: Path, limits: TableLimits) -> list[str]:
    """The names of the columns. Raises DataError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(_lines(file, path, limits)), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}:1: not valid CSV in UTF-8: {error}.") from error


def _lines(file: TextIO, path: Path, limits: TableLimits) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, limits.max_row_bytes + 1), ""), start=1):
        if len(line) > limits.max_row_bytes:
            raise limits.too_large_row(f"{path}:{number}")
        yield line


def _columns_of(group: Any) -> Iterator[Any]:
    return (group.column(number) for number in range(group.num_columns))


def _num_bytes(array: Any) -> int:
    """Of the values of an array, as large as they are once each stands for itself."""
    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        if len(array) == array.null_count:
            return 0
        lengths = pyarrow.compute.call_function("binary_length", [array.dictionary]).take(array.indices).cast("int64")
        return int(pyarrow.compute.call_function("sum", [lengths]).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return sum(map(_num_bytes, array.flatten()))
    if pyarrow.types.is_map(kind):
        entries = array.cast(pyarrow.list_(pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)])))
        return 8 * len(array) + _num_bytes(entries.flatten())
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        return 8 * len(array) + _num_bytes(array.flatten())
    return int(array.nbytes)
