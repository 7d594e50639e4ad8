"""Further abilities of datasets: rows that are read once, as a stream, and a quick check of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from spurline.errors import DataError


@dataclass(frozen=True)
class StreamedRow:
    """The values of a row, or a DataError if it cannot be read, and its location for messages."""

    values: Mapping[str, Any] | DataError
    location: str


class RowReader(Protocol):
    """Reads the rows of a stream once."""

    def read(self) -> StreamedRow | None:
        """Return the next row, or None after the last one. Every reader returns the same rows."""
        ...

    def position(self) -> dict[str, Any]:
        """Return the position as JSON values. A reader that is opened there returns the remaining rows."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


class StreamedDataset(Protocol):
    """Rows that are read once, in order, from data that is too large to read twice. Its config has `streams = True`.

    Factory: `Class(config, registry=Registry)` with a DatasetConfig. Raises DataError if the data cannot be found.

    label: short name used in uids and reports.
    """

    label: str

    def open(self, position: Mapping[str, Any] | None = None) -> RowReader:
        """Return a reader at the first row, or at the `position()` of an earlier reader."""
        ...


@runtime_checkable
class CheckableDataset(Protocol):
    """A dataset that can find unreadable rows faster than tokenization would."""

    def check(self) -> None:
        """Raise DataError for the first unreadable row."""
        ...
