"""The preference pairs of some datasets and the batches they make: one row, one pair.

Place on the way: rows with prompt, chosen and rejected -> two samples each (preference_rows) -> pairs -> joint layout
(pair_layout) -> TrainingBatch. Tokenization and collator are those of single samples, built in or of a plugin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline.config.run_config import DatasetConfig
from spurline.data.batch import TrainingBatch
from spurline.data.pair_layout import join_pairs, split_pairs
from spurline.data.preference_rows import SIDES, side_of
from spurline.data.sample_collector import distinct_labels
from spurline.data.sample_set import SampleSet
from spurline.data.token_store import TokenStore, fingerprint_of
from spurline.data.tokenizer import pad_token_id
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline.run_context import SourceContext

Pairs = NDArray[np.int64]

OTHER_ANSWER_LEFT_OUT = "other_answer_left_out"
"""Why a usable answer is not trained on: its pair is not whole."""


class PairSet(SampleSet):
    """`Samples` of pairs. Rows of which one answer is unusable are left out and counted."""

    def __init__(self, configs: Sequence[DatasetConfig], context: SourceContext) -> None:
        super().__init__(configs, context)
        store = self._tokenized.store
        found = [_pairs_of_dataset(store, dataset) for dataset in range(len(configs))]
        self._labels = tuple(distinct_labels([source.dataset.label.rpartition("/")[0] for source in self.answered()]))
        for label, pairs in zip(self._labels, found, strict=True):
            if not len(pairs):
                raise DataError(f"{label}: no row has both a usable chosen and a usable rejected answer.")
        self._pairs = np.concatenate(found)
        self._sizes = tuple(len(pairs) for pairs in found)
        # Both answers of a pair must be aligned as the collator would align two samples.
        self._align_to = math.lcm(context.layout.align_to, getattr(context.config.collator, "align_to", 1))
        self._pad_token_id = pad_token_id(context.tokenizer)

    @property
    def labels(self) -> tuple[str, ...]:
        return self._labels

    def sizes(self) -> tuple[int, ...]:
        return self._sizes

    def batch(self, numbers: NDArray[np.int64], *, training: bool) -> TrainingBatch:
        store, chosen = self._tokenized.store, self._pairs[numbers, 0]
        joint = join_pairs(
            store.view(self._pairs[numbers].ravel()),
            self._labels,
            store.source[chosen].astype(np.int64) // len(SIDES),
            store.row[chosen],
            align_to=self._align_to,
            pad_token_id=self._pad_token_id,
        )
        everything = np.arange(len(joint.store), dtype=np.int64)
        return split_pairs(self._collator.collate(joint.store.view(everything), training=training), joint.shapes)

    def fingerprint(self) -> str:
        """Also of which samples make up pairs."""
        return fingerprint_of([super().fingerprint(), xxhash.xxh3_128_hexdigest(self._pairs.data)])

    def summary(self) -> dict[str, Any]:
        """Also `pairs`. Token counts and lengths are of single answers, each with its prompt."""
        facts = super().summary()
        num_pairs = len(self._pairs)
        alone = len(self._tokenized.store) - len(SIDES) * num_pairs
        dropped = {**facts["dropped"], **({OTHER_ANSWER_LEFT_OUT: alone} if alone else {})}
        notes = [f"{num_pairs:,} pairs of a chosen and a rejected answer", *facts["notes"]]
        return {**facts, "pairs": num_pairs, "dropped": dropped, "notes": notes}

    def answered(self) -> Sequence[DatasetToTokenize]:
        """Prompts with their chosen answers."""
        return self._sources[:: len(SIDES)]

    def _to_tokenize(self, opened: Sequence[DatasetToTokenize]) -> Sequence[DatasetToTokenize]:
        return [side_of(source, side) for source in opened for side in SIDES]


def _pairs_of_dataset(store: TokenStore, dataset: int) -> Pairs:
    """int64 [pairs, 2]: store indices of both answers of each row that has both, in the order of the rows."""
    places = [np.flatnonzero(store.source == len(SIDES) * dataset + side) for side in range(len(SIDES))]
    _, of_chosen, of_rejected = np.intersect1d(
        store.row[places[0]], store.row[places[1]], assume_unique=True, return_indices=True
    )
    return np.stack([places[0][of_chosen], places[1][of_rejected]], axis=1).astype(np.int64)
