"""From dataset entries of the config to a token store: the first half of the data's way.

Everything after this (order, batches, collation) works on the store alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spurline.config.run_config import RunConfig
from spurline.protocols.dataset import ArrowDataset, CheckableDataset, Dataset, DatasetConfig
from spurline.protocols.tokenization import DatasetToTokenize, Tokenization, Tokenized

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase

    from spurline.plugins.registry import Registry


class FirstRows:
    """A dataset cut to its first rows."""

    def __init__(self, dataset: Dataset, limit: int) -> None:
        self.label = dataset.label
        self._dataset = dataset
        self._limit = limit

    @property
    def whole(self) -> int:
        """Rows of the dataset without the cut."""
        return len(self._dataset)

    def __len__(self) -> int:
        return min(self._limit, len(self._dataset))

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._dataset[row]

    def location(self, row: int) -> str:
        return self._dataset.location(row)

    def fingerprint(self) -> str:
        return f"{self._dataset.fingerprint()}[:{self._limit}]"

    def check(self) -> None:
        check_rows(self._dataset)

    def arrow(self, start: int, stop: int) -> pyarrow.Table | None:
        return arrow_rows(self._dataset, start, stop)


def open_datasets(
    configs: Sequence[DatasetConfig], registry: Registry, row_limit: int | None = None
) -> list[DatasetToTokenize]:
    """Create the dataset components. Raises DataError for data that cannot be found or read."""
    opened: list[DatasetToTokenize] = []
    for config in configs:
        dataset: Dataset = registry.create("dataset", config)
        opened.append(DatasetToTokenize(dataset if row_limit is None else FirstRows(dataset, row_limit), config))
    return opened


def check_rows(dataset: Dataset) -> None:
    """Raise DataError for the first unreadable row, where the dataset can tell before the rows are tokenized.

    To be called before long work on rows: the mistake in the last row should not cost the hours before it.
    """
    if isinstance(dataset, CheckableDataset):
        dataset.check()


def arrow_rows(dataset: Dataset, start: int, stop: int) -> pyarrow.Table | None:
    """Rows [start, stop) as an Arrow table, or None when the dataset does not hold them as one."""
    return dataset.arrow(start, stop) if isinstance(dataset, ArrowDataset) else None


def share_read(datasets: Sequence[DatasetToTokenize]) -> list[float]:
    """For each dataset the share of its rows that `row_limit` let through, 1.0 for all."""
    return [
        len(item.dataset) / max(1, item.dataset.whole) if isinstance(item.dataset, FirstRows) else 1.0
        for item in datasets
    ]


def tokenize(
    datasets: Sequence[DatasetToTokenize],
    config: RunConfig,
    registry: Registry,
    tokenizer: PreTrainedTokenizerBase,
) -> Tokenized:
    """All usable samples of the datasets, through the configured tokenization component."""
    tokenization: Tokenization = registry.create(
        "tokenization", config.tokenization, tokenizer=tokenizer, data=config.data
    )
    return tokenization.tokenize(datasets)
