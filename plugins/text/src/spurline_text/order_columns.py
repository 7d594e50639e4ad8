"""Read a column of the rows behind samples: what an order may know besides sizes and lengths.

In: datasets, and the row of each sample in them (some rows became no sample). Out: one value for each sample. Rows are
read again for that, without being tokenized; of Arrow tables only the column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError, listing, suggestion
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.rows.rows import column_paths, describe, value_at
from spurline_text.tokenization import arrow_rows

_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class ColumnsOfRows:
    """`SampleColumns` over datasets. rows: for each dataset the row of each of its samples, ascending, int64 [n]."""

    datasets: Sequence[DatasetToTokenize]
    rows: Sequence[NDArray[np.int64]]

    def values(self, name: str) -> Sequence[Any]:
        pairs = zip(self.datasets, self.rows, strict=True)
        return [value for dataset, rows in pairs for value in _values(dataset, rows, name)]

    def numbers(self, name: str) -> NDArray[np.float64]:
        numbers = np.full(sum(map(len, self.rows)), np.nan)
        for sample, value in enumerate(self.values(name)):
            if value is None:
                continue
            number = _number(value)
            if number is None:
                raise DataError(
                    f"{self.location(sample)}: {name} is {describe(value)}, but data.order needs a finite number there."
                    " Give every row a number, or name another column."
                )
            numbers[sample] = number
        return numbers

    def location(self, sample: int) -> str:
        starts = np.cumsum([0, *map(len, self.rows)])
        source = int(np.searchsorted(starts, sample, side="right")) - 1
        return self.datasets[source].dataset.location(int(self.rows[source][sample - starts[source]]))


def _number(value: Any) -> float | None:
    """The value as a finite number, or None. All values of a CSV file are text."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _values(source: DatasetToTokenize, rows: NDArray[np.int64], name: str) -> Iterator[Any]:
    dataset = source.dataset
    for start in range(0, len(dataset), _ROWS_AT_A_TIME):
        stop = min(start + _ROWS_AT_A_TIME, len(dataset))
        wanted = rows[slice(*np.searchsorted(rows, (start, stop)))].tolist()
        table = arrow_rows(dataset, start, stop) if wanted else None
        if table is not None:
            column = name if name in table.column_names else name.partition(".")[0]
            if column in table.column_names:
                found = table.column(column).take([row - start for row in wanted]).to_pylist()
                yield from (_value(source, row, {column: v}, name) for row, v in zip(wanted, found, strict=True))
                continue
        for row in wanted:
            yield _value_of_row(source, row, name)


def _value_of_row(source: DatasetToTokenize, row: int, name: str) -> Any:
    try:
        content = source.dataset[row]
    except DataError:
        if source.config.on_bad_row == "error":
            raise
        return None
    return _value(source, row, content, name)


def _value(source: DatasetToTokenize, row: int, content: Any, name: str) -> Any:
    value = value_at(content, name)
    if value is None:
        names = list(column_paths(source.dataset[row]))
        raise DataError(
            f"{source.dataset.location(row)}: {name} is missing or null, and data.order needs it."
            f"{suggestion(name, names)} Give every row a value, or name another column. The row has: {listing(names)}."
        )
    return value
