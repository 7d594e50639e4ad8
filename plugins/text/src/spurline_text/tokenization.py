"""Turn dataset entries of the config into a token store.

This module opens and checks datasets. Every tokenization passes its samples, in the order of datasets and rows, to a
`SampleCollector`, which counts the rows that were left out or cut. Tokenization `sequential` encodes rows in chunks, so
that the tokenizer can use all its threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig, RunConfig
from spurline.data.token_store import IGNORED, Count, SampleBlock, Tokenized, TokenStore, TokenStoreBuilder, joined
from spurline.errors import DataError
from spurline.protocols.dataset import Dataset, DatasetConfig
from spurline.protocols.order import epoch_shares
from spurline.protocols.tokenization import DatasetToTokenize, Tokenization
from spurline_text.configs import SequentialTokenizationConfig
from spurline_text.datasets.protocols import CheckableDataset
from spurline_text.encoding import NO_LOSS_TOKENS_AFTER_TRUNCATION, Dropped, RowEncoder, Sample
from spurline_text.rows.rows import RowView, absent_column_problem, unknown_column_problem

if TYPE_CHECKING:
    from spurline.plugins.registry import Registry


_ROWS_WITH_COLUMNS = 1000
"""Number of rows at the start of a dataset that are searched for the columns in the setting `columns`."""


class DerivedDataset:
    """A `Dataset` that wraps another dataset. A subclass may change the rows and the label."""

    def __init__(self, dataset: Dataset) -> None:
        self.label = dataset.label
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._dataset[row]

    def location(self, row: int) -> str:
        return self._dataset.location(row)

    def check(self) -> None:
        check_rows(self._dataset)


class FirstRows(DerivedDataset):
    """The first rows of a dataset."""

    def __init__(self, dataset: Dataset, limit: int) -> None:
        super().__init__(dataset)
        self._limit = limit

    @property
    def whole(self) -> int:
        """Return the number of rows of the whole dataset."""
        return len(self._dataset)

    def __len__(self) -> int:
        return min(self._limit, len(self._dataset))

    def fingerprint(self) -> str:
        return f"{self._dataset.fingerprint()}[:{self._limit}]"


def open_datasets(
    configs: Sequence[DatasetConfig], registry: Registry, row_limit: int | None = None
) -> list[DatasetToTokenize]:
    """Create the dataset components.

    Raises DataError for data that cannot be found or read, and for names in `columns` that no row has. Without the
    check of names, a misspelled name of an optional column such as `system` would be ignored.
    """
    opened: list[Dataset] = [registry.create("dataset", config, registry=registry) for config in configs]
    for dataset, config in zip(opened, configs, strict=True):
        problem = unknown_column_problem(config.columns)
        if config.columns and problem is None:
            problem = absent_column_problem(config.columns, _first_rows(dataset))
        if problem is not None:
            raise DataError(f"{dataset.label}: {problem}")
    if row_limit is not None:
        opened = [FirstRows(dataset, row_limit) for dataset in opened]
    return [DatasetToTokenize(dataset, config) for dataset, config in zip(opened, configs, strict=True)]


def _first_rows(dataset: Dataset) -> Iterator[Mapping[str, Any]]:
    """Yield the first rows, except rows that cannot be read."""
    for row in range(min(len(dataset), _ROWS_WITH_COLUMNS)):
        try:
            yield dataset[row]
        except DataError:
            continue


def plain_text_notes(
    sources: Sequence[DatasetToTokenize], tokenizer: PreTrainedTokenizerBase, answer: str | None = None
) -> list[str]:
    """Return a note for each dataset with plain text prompts for a chat model, unless its config asks for plain text.

    The first row of each dataset decides. `answer` is the column of the trained answer, or None if answers are
    generated.
    """
    notes: list[str] = []
    for dataset, config in ((source.dataset, source.config) for source in sources):
        view = RowView(next(_first_rows(dataset), {}), config.columns)
        names = ["prompt", *([answer] if answer else [])]
        is_plain = all(isinstance(view.get(name), str) for name in names)
        is_chosen = config.format != "auto" or "instruction" in config.columns
        if tokenizer.chat_template is None or is_chosen or not is_plain or "messages" in view:
            continue
        output = f", output: {view.label(answer)}" if answer == "completion" and "label" not in view else ""
        notes.append(
            f"{dataset.label}: '{view.label('prompt')}' is plain text that the model continues, although the model has "
            f"a chat template. Set `columns: {{instruction: {view.label('prompt')}{output}}}` to make it a turn of the "
            "user, or `format: prompt_completion` if plain text is meant"
        )
    return notes


def check_rows(dataset: Dataset) -> None:
    """If the dataset has a quick check of its rows, run the check. Raises DataError for the first unreadable row."""
    if isinstance(dataset, CheckableDataset):
        dataset.check()


def share_read(datasets: Sequence[DatasetToTokenize]) -> list[float]:
    """Return the fraction of each dataset's rows that are within `row_limit`."""
    return [
        len(item.dataset) / max(1, item.dataset.whole) if isinstance(item.dataset, FirstRows) else 1.0
        for item in datasets
    ]


def passes_per_epoch(datasets: Sequence[DatasetConfig], sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the passes over each dataset in one epoch, by its `weight` or `share` and its number of samples."""
    amounts = [size * dataset.weight for dataset, size in zip(datasets, sizes, strict=True)]
    weighted = sum(amount for amount, dataset in zip(amounts, datasets, strict=True) if dataset.share is None)
    # Without shares this is exactly 1.
    rest = (1 - sum(dataset.share or 0 for dataset in datasets)) * sum(amounts) / weighted if weighted else 0.0
    return tuple(
        dataset.weight * rest if dataset.share is None else dataset.share * sum(amounts) / max(1, size)
        for dataset, size in zip(datasets, sizes, strict=True)
    )


def mix_notes(datasets: Sequence[DatasetConfig], sizes: Sequence[int], labels: Sequence[str]) -> list[str]:
    """Return how often each dataset comes if any has a `share`, and otherwise which weights were rounded."""
    passes, has_shares = passes_per_epoch(datasets, sizes), any(dataset.share is not None for dataset in datasets)
    return [
        f"{label}: {amount:,} samples of an epoch, {amount / max(1, size):.3g} times each of its {size:,}"
        + ("" if has_shares else f" (its weight {once:g} is rounded to whole samples)")
        for label, size, once, amount in zip(labels, sizes, passes, epoch_shares(sizes, passes), strict=True)
        if has_shares or abs(amount - once * size) > 0.05 * once * size
    ]


def tokenize(
    datasets: Sequence[DatasetToTokenize], config: RunConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase
) -> Tokenized:
    """Tokenize the datasets as the config says, and return all usable samples."""
    tokenization: Tokenization = registry.create(
        "tokenization", config.tokenization, tokenizer=tokenizer, data=config.data
    )
    return tokenization.tokenize(datasets)


ROWS_PER_CALL = 256
"""Rows encoded by one call of the tokenizer."""

TRUNCATED = "truncated"
"""Key in `Tokenized.examples` for the first sample that was cut."""


def block_of_outcomes(source: int, outcomes: Sequence[Sample | Dropped]) -> SampleBlock:
    """Join the results of a `RowEncoder` into one block, in order. `source` is the number of the dataset."""
    samples: list[Sample] = []
    counts: dict[tuple[str, bool], Count] = {}
    for outcome in outcomes:
        if isinstance(outcome, Dropped):
            fates = [(outcome.reason, False)]
        else:
            samples.append(outcome)
            fates = [("", False)] * outcome.truncated + [(what, True) for what in outcome.ignored]
        for fate in fates:
            seen = counts.get(fate, Count(fate[0], 0, outcome.row, fate[1]))
            counts[fate] = replace(seen, count=seen.count + 1)
    return SampleBlock(
        source,
        tokens=joined([sample.tokens for sample in samples], np.int32),
        loss_mask=joined([sample.loss_mask for sample in samples], np.uint8),
        lengths=np.array([len(sample.tokens) for sample in samples], dtype=np.int64),
        rows=np.array([sample.row for sample in samples], dtype=np.int64),
        num_rows=len({outcome.row for outcome in outcomes}),
        counts=tuple(counts.values()),
    )


class SampleSink(Protocol):
    """Takes tokenized samples, and keeps them in memory (TokenStoreBuilder) or on disk."""

    def extend(self, block: SampleBlock) -> None:
        """Append the samples of a block."""
        ...

    def build(self) -> TokenStore:
        """Return the store of everything appended."""
        ...


class SampleCollector:
    """Collects the samples of datasets, one dataset after another. If `sink` is None, the samples stay in memory."""

    def __init__(self, sources: Sequence[DatasetToTokenize], sink: SampleSink | None = None) -> None:
        self._datasets = [source.dataset for source in sources]
        self._sink = sink if sink is not None else TokenStoreBuilder(store_labels(sources))
        self._kept = [0] * len(sources)
        self._dropped: list[Counter[str]] = [Counter() for _ in sources]
        self._examples: list[dict[str, str]] = [{} for _ in sources]
        self._ignored: Counter[str] = Counter()
        self._truncated = 0

    def add(self, block: SampleBlock) -> None:
        """Add the samples and counts of the next rows of a dataset."""
        first_seen = self._examples[block.source]
        for item in block.counts:
            name = f"{IGNORED} {item.reason}" if item.kept else item.reason or TRUNCATED
            if item.kept:
                self._ignored[item.reason] += item.count
            elif item.reason:
                self._dropped[block.source][item.reason] += item.count
            else:
                self._truncated += item.count
            first_seen.setdefault(name, self._datasets[block.source].location(item.first_row))
        if len(block.rows):
            self._kept[block.source] += len(block.rows)
            self._sink.extend(block)

    def encode(self, source: int, encoder: RowEncoder) -> None:
        """Encode and add all rows of a dataset."""
        num_rows = len(self._datasets[source])
        for start in range(0, num_rows, ROWS_PER_CALL):
            rows = range(start, min(start + ROWS_PER_CALL, num_rows))
            self.add(block_of_outcomes(source, encoder.encode(rows)))

    def finish(self, *, may_be_empty: bool = False) -> Tokenized:
        """Return store and counts. Raises DataError for a dataset without usable samples, unless `may_be_empty`."""
        for source, kept in enumerate(self._kept):
            if kept == 0 and not may_be_empty:
                raise DataError(self._nothing_left(source))
        dropped: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for counts, first in zip(self._dropped, self._examples, strict=True):
            dropped.update(counts)
            examples = first | examples
        return Tokenized(self._sink.build(), dict(dropped), self._truncated, examples, dict(self._ignored))

    def _nothing_left(self, source: int) -> str:
        dataset, examples = self._datasets[source], self._examples[source]
        counts = ", ".join(
            f"{reason}: {count} (first at {examples[reason]})" for reason, count in self._dropped[source].most_common()
        )
        fix = " Raise data.max_length." if NO_LOSS_TOKENS_AFTER_TRUNCATION in examples else ""
        return (
            f"{dataset.label}: no usable sample in {len(dataset)} rows. "
            f"Left out: {counts or 'nothing, it is empty'}.{fix}"
        )


def store_labels(sources: Sequence[DatasetToTokenize]) -> list[str]:
    return distinct_labels([source.dataset.label for source in sources])


def distinct_labels(labels: Sequence[str]) -> list[str]:
    """Return unique labels. A repeated label gets the suffix `#2`, `#3`, ..."""
    result: list[str] = []
    for label in labels:
        candidates = (label, *(f"{label}#{number}" for number in range(2, len(labels) + 2)))
        result.append(next(candidate for candidate in candidates if candidate not in result))
    return result


class SequentialTokenization:
    """Tokenizes datasets one after another."""

    def __init__(
        self, config: SequentialTokenizationConfig, *, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._tokenizer = tokenizer
        self._data = data

    def tokenize(self, datasets: Sequence[DatasetToTokenize]) -> Tokenized:
        for dataset in datasets:
            check_rows(dataset.dataset)
        # Make all encoders first, so that a wrong format in any dataset is found early.
        encoders = [RowEncoder(dataset, self._tokenizer, self._data) for dataset in datasets]
        collector = SampleCollector(datasets)
        for source, encoder in enumerate(encoders):
            collector.encode(source, encoder)
        return collector.finish()
