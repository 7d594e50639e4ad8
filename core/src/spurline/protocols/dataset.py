"""Kind `dataset`: rows of training or evaluation data, before tokenization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Dataset(Protocol):
    """Random access to rows.

    Factory: `Class(config)`, config a DatasetConfig. Raises DataError when the data cannot be found or read.
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
