"""Kind `dataset`: rows of training or evaluation data, before tokenization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


class Dataset(Protocol):
    """Random access to rows.

    Factory: `Class(config)`, config a DatasetConfig. Raises DataError when the data cannot be found or read. May open
    rows late: `label` and `fingerprint` are all that is asked for when the tokens are in a cache. A dataset that can
    be pickled is tokenized by several processes.
    """

    label: str
    """Short name used in uids and reports."""

    def __len__(self) -> int:
        """Number of rows after `split` was applied."""
        ...

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """One row by 0-based index, columns under the names in the file."""
        ...

    def location(self, row: int) -> str:
        """Where a row comes from, for error messages: `train.jsonl:12` where the line is known."""
        ...

    def fingerprint(self) -> str:
        """Changes when the rows do; equal for equal content wherever it is stored."""
        ...


@runtime_checkable
class CheckableDataset(Protocol):
    """A dataset that can find unreadable rows faster than tokenization would."""

    def check(self) -> None:
        """Raise DataError for the first unreadable row."""
        ...


@runtime_checkable
class ArrowDataset(Protocol):
    """A dataset whose rows may be had as Arrow tables, without a Python object per value."""

    def arrow(self, start: int, stop: int) -> Any:
        """Rows [start, stop) as a pyarrow.Table, or None when these are not stored as a table."""
        ...
