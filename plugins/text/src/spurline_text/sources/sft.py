"""Source `sft`: tokenized samples, in an order that is known beforehand.

Place on the way: dataset configs -> tokenization -> SampleSet -> order -> collator -> TrainingBatch. Held-out
evaluation draws its own batches from a SampleSet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.config.section import ComponentConfig
from spurline.data.batch import TrainingBatch
from spurline.data.token_store import keys_of_samples, summarize
from spurline.protocols.collator import Collator
from spurline.protocols.dataset import DatasetConfig, Longest
from spurline.protocols.order import Order, SampleFacts, epoch_shares
from spurline.protocols.source import BatchSource, Samples, SourceContext
from spurline.protocols.stateful import refuse_other_data
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.order_columns import ColumnsOfRows
from spurline_text.tokenization import open_datasets, plain_text_notes, share_read, tokenize
from spurline_text.tokenizer import pad_token_id

_MOST_KEYS = 1_000_000
"""At most so many samples are compared with held-out ones; more would hold up the start."""


class SampleSet:
    """`Samples` of tokenized datasets; `shares` has for each dataset the share of its rows that was read.

    Making one raises DataError for data that cannot be found, read or used.
    """

    answer = "completion"
    """The column that is trained in rows of prompts and answers."""

    def __init__(self, configs: Sequence[DatasetConfig], context: SourceContext) -> None:
        run, registry = context.config, context.host.registry
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
        return self._collator.collate(self._tokenized.store.view(numbers), training=training)

    def fingerprint(self) -> str:
        return self._tokenized.store.fingerprint

    def summary(self) -> dict[str, Any]:
        facts = summarize(self._tokenized)
        return {**facts, "notes": [*facts["notes"], *self._plain_text]}

    @cached_property
    def _keys(self) -> NDArray[np.uint64]:
        return keys_of_samples(self._tokenized.store, self._whole()[:_MOST_KEYS])

    def keys(self) -> NDArray[np.uint64]:
        return self._keys

    def location(self, number: int) -> str:
        store = self._tokenized.store
        index = self._whole()[number]
        return self._sources[int(store.source[index])].dataset.location(int(store.row[index]))

    def _whole(self) -> NDArray[np.int64]:
        """Return for each sample the place in the store that identifies it."""
        return np.arange(len(self._tokenized.store), dtype=np.int64)

    def answered(self) -> Sequence[DatasetToTokenize]:
        return self._sources

    def facts(self, weights: Sequence[float], per_step: int) -> SampleFacts:
        columns = ColumnsOfRows(self._opened, self._rows())
        return SampleFacts(self.sizes(), tuple(weights), per_step, columns, self._lengths)

    def _rows(self) -> Sequence[NDArray[np.int64]]:
        return np.split(self._tokenized.store.row[self._whole()], np.cumsum(self.sizes())[:-1])

    def _lengths(self) -> NDArray[np.int64]:
        return self._tokenized.store.lengths()

    def _to_tokenize(self, opened: Sequence[DatasetToTokenize]) -> Sequence[DatasetToTokenize]:
        """Return the datasets to tokenize; rows that hold several texts become several datasets."""
        return opened


def shared_note(held_out: Samples, source: BatchSource) -> list[str]:
    """Return a note that counts held-out samples among the training samples; empty if there are none, or unknown."""
    trained = source.sample_keys()
    return [] if trained is None else note_of_shared(held_out.keys(), trained, held_out.location)


def note_of_shared(
    held_out: NDArray[np.uint64], trained: NDArray[np.uint64], location: Callable[[int], str]
) -> list[str]:
    """Return a note that counts held-out rows with the hash of a training row; `location` names a held-out row."""
    shared = np.flatnonzero(np.isin(held_out, trained))
    if not len(shared):
        return []
    return [
        f"{len(shared):,} of {len(held_out):,} held-out rows are also training rows, so their scores do not show "
        f"how well the model does on new rows (first: {location(int(shared[0]))})"
    ]


def longest_sample(samples: Samples) -> Longest:
    facts = samples.summary()
    where = f"sample {facts['longest_at']} (rows counted from 0)"
    return Longest(int(facts["longest"]), where, "data.max_length")


class SftSource(BatchSource):
    """Makes the batch of a step from config and step alone, so nothing is carried from step to step."""

    pure = True

    def __init__(self, config: ComponentConfig, context: SourceContext, samples: SampleSet | None = None) -> None:
        """Train on `samples`; None makes one sample per row."""
        run = context.config
        self._batch_size = run.batch_size
        self._samples = SampleSet(run.data.train, context) if samples is None else samples
        weights = [dataset.weight for dataset in run.data.train]
        facts = self._samples.facts(weights, self._batch_size)
        self._order: Order = context.host.registry.create("order", run.data.order, samples=facts, seed=run.seed)
        shares = self._samples.shares
        # Rows that were not read are assumed to be as usable as those that were.
        sizes = [round(size / share) for size, share in zip(self._samples.sizes(), shares, strict=True)]
        per_epoch = epoch_shares(sizes, weights)
        self._samples_per_epoch = sum(per_epoch)
        self._rounded = [
            f"{label}: weight {weight:g} of {size} samples is rounded to {share} per epoch"
            for label, weight, size, share in zip(self._samples.labels, weights, sizes, per_epoch, strict=True)
            if abs(share - weight * size) > 0.05 * weight * size
        ]
        self._read_in_part = min(shares) < 1
        self.total_steps = run.total_steps(self._samples_per_epoch)

    def summary(self) -> Mapping[str, object]:
        return {
            **self._samples.summary(),
            "samples_per_epoch": self._samples_per_epoch,
            "read_in_part": self._read_in_part,
            "rounded": self._rounded,
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
            "The training data is not what the checkpoint was trained on: tokens or loss masks differ (a changed file, "
            "tokenizer or chat template). Restore them, or start again with another run_dir.",
        )
