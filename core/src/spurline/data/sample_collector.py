"""Gather encoded samples into a TokenStore, counting what was left out or cut.

The last station of every tokenization: fed in the order of datasets and rows, whoever encoded them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from spurline.data.encoding import Dropped, Sample
from spurline.data.token_store import TokenStoreBuilder
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize, Tokenized

TRUNCATED = "truncated"
"""Key in `Tokenized.examples` for the first sample that was cut."""


class SampleCollector:
    """Collects the samples of several datasets, one dataset after another."""

    def __init__(self, sources: Sequence[DatasetToTokenize]) -> None:
        self._datasets = [source.dataset for source in sources]
        self._builder = TokenStoreBuilder(distinct_labels([dataset.label for dataset in self._datasets]))
        self._dropped: list[Counter[str]] = [Counter() for _ in sources]
        self._examples: list[dict[str, str]] = [{} for _ in sources]
        self._truncated = 0

    def add(self, source: int, outcomes: Iterable[Sample | Dropped]) -> None:
        """Outcomes of the next rows of dataset number `source`."""
        dataset = self._datasets[source]
        for outcome in outcomes:
            if isinstance(outcome, Dropped):
                self._dropped[source][outcome.reason] += 1
                self._examples[source].setdefault(outcome.reason, dataset.location(outcome.row))
                continue
            if outcome.truncated:
                self._truncated += 1
                self._examples[source].setdefault(TRUNCATED, dataset.location(outcome.row))
            self._builder.add(outcome.tokens, outcome.loss_mask, source, outcome.row)  # type: ignore[arg-type]

    def finish(self) -> Tokenized:
        """The store and the counts. Raises DataError when a dataset has no usable sample."""
        store = self._builder.build()
        for source, size in enumerate(store.sizes()):
            if size == 0:
                raise DataError(self._nothing_left(source))
        dropped: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for counts, first in zip(self._dropped, self._examples, strict=True):
            dropped.update(counts)
            examples = first | examples
        return Tokenized(store, dict(dropped), self._truncated, examples)

    def _nothing_left(self, source: int) -> str:
        dataset, examples = self._datasets[source], self._examples[source]
        counts = ", ".join(
            f"{reason}: {count} (first at {examples[reason]})" for reason, count in self._dropped[source].most_common()
        )
        return (
            f"{dataset.label}: no usable sample in {len(dataset)} rows. Left out: {counts or 'nothing, it is empty'}."
        )


def distinct_labels(labels: Sequence[str]) -> list[str]:
    """Labels of which no two are equal: a repeated one gets `#2`, `#3`, ..."""
    result: list[str] = []
    for label in labels:
        number, candidate = 2, label
        while candidate in result:
            number, candidate = number + 1, f"{label}#{number}"
        result.append(candidate)
    return result
