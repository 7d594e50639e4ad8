"""Read a column of the rows behind samples, for an order that needs more than sizes and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError, listing, suggestion
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.rows.rows import column_paths, describe, value_at


@dataclass(frozen=True)
class ColumnsOfRows:
    """`SampleColumns` over datasets; `rows` has for each dataset the row of each of its samples, int64 [n]."""

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
            try:
                # All values of a CSV file are text.
                numbers[sample] = float(value)
            except (TypeError, ValueError, OverflowError):
                numbers[sample] = np.nan
            if not np.isfinite(numbers[sample]):
                raise DataError(
                    f"{self.location(sample)}: {name} is {describe(value)}, but data.order needs a finite number there."
                    " Give every row a number, or name another column."
                )
        return numbers

    def location(self, sample: int) -> str:
        starts = np.cumsum([0, *map(len, self.rows)])
        source = int(np.searchsorted(starts, sample, side="right")) - 1
        return self.datasets[source].dataset.location(int(self.rows[source][sample - starts[source]]))


def _values(source: DatasetToTokenize, rows: NDArray[np.int64], name: str) -> Iterator[Any]:
    """Yield the value of each row; None for a row that cannot be read and is skipped."""
    for row in rows.tolist():
        try:
            content = source.dataset[row]
        except DataError:
            if source.config.on_bad_row == "error":
                raise
            yield None
            continue
        value = value_at(content, name)
        if value is None:
            names = list(column_paths(content))
            raise DataError(
                f"{source.dataset.location(row)}: {name} is missing or null, and data.order needs it."
                f"{suggestion(name, names)} Give every row a value, or name another column. The row has: "
                f"{listing(names)}."
            )
        yield value
