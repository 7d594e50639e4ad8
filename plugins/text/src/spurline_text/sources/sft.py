"""Source `sft`: tokenized samples, in an order that is known before training.

Data flow: dataset configs -> tokenization -> SampleSet -> order -> collator -> TrainingBatch. Held-out
evaluation draws its own batches from a SampleSet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from spurline.config.section import ComponentConfig
from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, TOKEN_COLUMNS, TrainingBatch
from spurline.data.token_store import TokenStore, fingerprint_of, summarize
from spurline.errors import ConfigError, DataError, listing, suggestion
from spurline.protocols.collator import Collator
from spurline.protocols.dataset import DatasetConfig, Longest
from spurline.protocols.order import Order, SampleFacts, epoch_shares
from spurline.protocols.source import BatchSource, Samples, SourceContext
from spurline.protocols.stateful import refuse_other_data
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.rows.rows import column_paths, describe, value_at
from spurline_text.tokenization import (
    mix_notes,
    open_datasets,
    passes_per_epoch,
    plain_text_notes,
    share_read,
    tokenize,
)
from spurline_text.tokenizer import pad_token_id

_MOST_KEYS = 1_000_000
"""Number of samples that are compared with held-out samples. Comparing more would delay the start of the run."""


@dataclass(frozen=True)
class ColumnsOfRows:
    """Reads dataset columns. Implements `SampleColumns`.

    `rows` has one int64 array [n] per dataset, with the row number of each sample. `reader` is the setting that needs
    the columns, for messages.
    """

    datasets: Sequence[DatasetToTokenize]
    rows: Sequence[NDArray[np.int64]]
    reader: str = "data.order"

    def values(self, name: str) -> Sequence[Any]:
        pairs = zip(self.datasets, self.rows, strict=True)
        return [value for dataset, rows in pairs for value in self._values(dataset, rows, name)]

    def numbers(self, name: str) -> NDArray[np.float64]:
        numbers = np.full(sum(map(len, self.rows)), np.nan)
        for sample, value in enumerate(self.values(name)):
            if value is None:
                continue
            with suppress(TypeError, ValueError, OverflowError):
                # The values of a CSV file are text.
                numbers[sample] = float(value)
            if not np.isfinite(numbers[sample]):
                raise DataError(
                    f"{self.location(sample)}: {name} is {describe(value)}, but {self.reader} needs a finite number "
                    "there. Give every row a number, or name another column."
                )
        return numbers

    def location(self, sample: int) -> str:
        starts = np.cumsum([0, *map(len, self.rows)])
        source = int(np.searchsorted(starts, sample, side="right")) - 1
        return self.datasets[source].dataset.location(int(self.rows[source][sample - starts[source]]))

    def _values(self, source: DatasetToTokenize, rows: NDArray[np.int64], name: str) -> Iterator[Any]:
        """Yield the value of each row, or None for an unreadable row that `on_bad_row: skip` skips."""
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
                    f"{source.dataset.location(row)}: {name} is missing or null, and {self.reader} needs it."
                    f"{suggestion(name, names)} Give every row a value, or name another column. The row has: "
                    f"{listing(names)}."
                )
            yield value


def refuse_columns_of_batches(carried: Collection[str]) -> None:
    """Raise ConfigError if `source.carry` names a column that batches have anyway."""
    for name in carried:
        if name in TOKEN_COLUMNS or name in OPTIONAL_TOKEN_COLUMNS:
            raise ConfigError.at("source.carry", f"names '{name}', a column of every batch. Rename it in the data.")


def values_of_segments(batch: TrainingBatch, values: NDArray[Any], *, of_padding: int = 0) -> Tensor:
    """Return a column [R, L] that gives each token the value of its segment. `values` has one per segment."""
    ids = batch.tokens["segment_ids"].long()
    before = torch.from_numpy(batch.segments["uid"].offsets[:-1]).unsqueeze(1)
    table = torch.from_numpy(np.append(values, values.dtype.type(of_padding)))
    return table[torch.where(ids > 0, before + ids - 1, -1)]


class SampleSet:
    """The `Samples` of tokenized datasets. `shares` contains the fraction of rows that was read from each dataset.

    The constructor raises DataError for data that cannot be found, read or used.
    """

    answer = "completion"
    """Name of the answer column. In rows with a prompt and an answer, the answer has loss."""

    def __init__(self, configs: Sequence[DatasetConfig], context: SourceContext) -> None:
        run, registry = context.config, context.host.registry
        refuse_columns_of_batches(run.source.facts.carried)
        self._carries = sorted({*run.source.facts.carried} & registry.create("loss", run.loss).needs)
        opened = open_datasets(configs, registry, context.row_limit)
        self.shares = share_read(opened)
        self._opened = opened
        self._plain_text = plain_text_notes(opened, context.tokenizer, self.answer)
        self._sources = self._to_tokenize(opened)
        context.progress(f"tokenizing {', '.join(item.dataset.label for item in opened)}")
        self._tokenized = tokenize(self._sources, run, registry, context.tokenizer)
        self._collator: Collator = registry.create(
            "collator", run.collator, pad_token_id=pad_token_id(context.tokenizer), layout=context.layout
        )

    @property
    def labels(self) -> tuple[str, ...]:
        return self._tokenized.store.labels

    def sizes(self) -> tuple[int, ...]:
        return self._tokenized.store.sizes()

    def batch(self, numbers: NDArray[np.int64], *, training: bool) -> TrainingBatch:
        batch = self._collator.collate(self._tokenized.store.view(numbers), training=training)
        return self.with_carried(batch, numbers)

    def with_carried(self, batch: TrainingBatch, numbers: NDArray[np.int64]) -> TrainingBatch:
        """Add the columns of `source.carry` that the loss needs to a batch of these samples."""
        if not self._carries:
            return batch
        number_of = {self._uid(number): number for number in numbers.tolist()}
        places = np.array([number_of[uid] for uid in batch.segments["uid"].values.tolist()], np.int64)
        columns = {name: values_of_segments(batch, values[places]) for name, values in self._carried.items()}
        return replace(batch, tokens={**batch.tokens, **columns})

    @cached_property
    def _carried(self) -> Mapping[str, NDArray[np.float32]]:
        """The number of each sample, by column."""
        columns = replace(self._columns(), reader="source.carry")
        return {name: columns.numbers(name).astype(np.float32) for name in self._carries}

    def _uid(self, number: int) -> str:
        """Return the uid that segments of this sample have in batches."""
        return self._tokenized.store.uid(number)

    def fingerprint(self) -> str:
        carried = [f"{name}/{xxhash.xxh3_128_hexdigest(values.data)}" for name, values in self._carried.items()]
        tokens = self._tokenized.store.fingerprint
        return fingerprint_of([tokens, *carried]) if carried else tokens

    def summary(self) -> dict[str, Any]:
        facts = summarize(self._tokenized)
        carried = [f"column {name}: {found.min():g} to {found.max():g}" for name, found in self._carried.items()]
        return {**facts, "notes": [*facts["notes"], *self._plain_text, *carried]}

    @cached_property
    def _keys(self) -> NDArray[np.uint64]:
        return _keys_of_samples(self._tokenized.store, self._whole()[:_MOST_KEYS])

    def keys(self) -> NDArray[np.uint64]:
        return self._keys

    def location(self, number: int) -> str:
        store = self._tokenized.store
        index = self._whole()[number]
        return self._sources[int(store.source[index])].dataset.location(int(store.row[index]))

    def _whole(self) -> NDArray[np.int64]:
        """Return the store index that identifies each sample. In a subclass, a sample may have several entries."""
        return np.arange(len(self._tokenized.store), dtype=np.int64)

    def answered(self) -> Sequence[DatasetToTokenize]:
        return self._sources

    def facts(self, weights: Sequence[float], per_step: int) -> SampleFacts:
        return SampleFacts(self.sizes(), tuple(weights), per_step, self._columns(), self._lengths)

    def _columns(self) -> ColumnsOfRows:
        rows = np.split(self._tokenized.store.row[self._whole()], np.cumsum(self.sizes())[:-1])
        return ColumnsOfRows(self._opened, rows)

    def _lengths(self) -> NDArray[np.int64]:
        return self._tokenized.store.lengths()

    def _to_tokenize(self, opened: Sequence[DatasetToTokenize]) -> Sequence[DatasetToTokenize]:
        """Return the datasets to tokenize. A subclass whose rows have several texts returns one dataset per text."""
        return opened


def note_of_shared(
    held_out: NDArray[np.uint64], trained: NDArray[np.uint64], location: Callable[[int], str]
) -> list[str]:
    """Return a list with a note on held-out rows whose hash is also a training row's hash, or an empty list.

    `location` returns the location of a held-out row.
    """
    shared = np.flatnonzero(np.isin(held_out, trained))
    if not len(shared):
        return []
    return [
        f"{len(shared):,} of {len(held_out):,} held-out rows are also training rows, so their scores do not show "
        f"how good the model is on new rows (first: {location(int(shared[0]))})"
    ]


def longest_sample(samples: Samples) -> Longest:
    facts = samples.summary()
    where = f"sample {facts['longest_at']} (rows counted from 0)"
    return Longest(int(facts["longest"]), where, "data.max_length")


class SftSource(BatchSource):
    """A source whose batches depend only on the config and the step number. It keeps no state between steps."""

    pure = True

    def __init__(self, config: ComponentConfig, context: SourceContext, samples: SampleSet | None = None) -> None:
        """Train on `samples`. If it is None, each row of `data.train` is a sample."""
        run = context.config
        self._batch_size = run.batch_size
        self._samples = SampleSet(run.data.train, context) if samples is None else samples
        facts = self._samples.facts(passes_per_epoch(run.data.train, self._samples.sizes()), self._batch_size)
        self._order: Order = context.host.registry.create("order", run.data.order, samples=facts, seed=run.seed)
        shares = self._samples.shares
        # Assume that unread rows give as many samples per row as the rows that were read.
        sizes = [round(size / share) for size, share in zip(self._samples.sizes(), shares, strict=True)]
        self._samples_per_epoch = sum(epoch_shares(sizes, passes_per_epoch(run.data.train, sizes)))
        self._notes = mix_notes(run.data.train, sizes, self._samples.labels)
        self.total_steps = run.total_steps(self._samples_per_epoch)

    def summary(self) -> Mapping[str, object]:
        facts = self._samples.summary()
        return {
            **facts,
            "notes": [*facts["notes"], *self._notes],
            "samples_per_epoch": self._samples_per_epoch,
            "read_in_part": min(self._samples.shares) < 1,
        }

    def longest(self) -> Longest:
        return longest_sample(self._samples)

    def sample_keys(self) -> NDArray[np.uint64]:
        return self._samples.keys()

    def build(self, step: int) -> TrainingBatch:
        numbers = self._order.positions((step - 1) * self._batch_size, step * self._batch_size)
        return self._samples.batch(numbers, training=True)

    def epoch(self, step: int) -> float:
        return step * self._batch_size / self._samples_per_epoch

    def state_dict(self) -> dict[str, object]:
        return {"data": self._samples.fingerprint()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        refuse_other_data(
            state,
            self._samples.fingerprint(),
            "The training data differs from the data of the checkpoint in tokens, loss masks or carried columns: a "
            "file, the tokenizer or the chat template has changed. Restore it, or start again with another run_dir.",
        )


def _keys_of_samples(store: TokenStore, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of the tokens of each of these samples. This takes about two microseconds per sample."""
    view = store.view(indices)
    return np.array(
        [xxhash.xxh3_64_intdigest(np.ascontiguousarray(view.tokens(i)).data) for i in range(len(view))], np.uint64
    )
