"""The tokenized samples of some datasets and the batches they make: one row, one sample.

Place on the way: dataset configs -> tokenization -> SampleSet -> collator -> TrainingBatch. Sources draw training
batches from it, evaluation its own; in which order is theirs to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.config.run_config import DatasetConfig
from spurline.data.batch import TrainingBatch
from spurline.data.reading import open_datasets, share_read, tokenize
from spurline.data.summary import summarize
from spurline.data.tokenizer import pad_token_id
from spurline.protocols.collator import Collator
from spurline.protocols.tokenization import DatasetToTokenize
from spurline.run_context import SourceContext


class SampleSet:
    """See `Samples`. Raises DataError for data that cannot be found, read or used.

    shares: for each dataset the share of its rows that was read. labels: name of each dataset.
    """

    def __init__(self, configs: Sequence[DatasetConfig], context: SourceContext) -> None:
        run, registry = context.config, context.host.registry
        opened = open_datasets(configs, registry, context.row_limit)
        self.shares = share_read(opened)
        self._sources = self._to_tokenize(opened)
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
        return summarize(self._tokenized)

    def answered(self) -> Sequence[DatasetToTokenize]:
        return self._sources

    def _to_tokenize(self, opened: Sequence[DatasetToTokenize]) -> Sequence[DatasetToTokenize]:
        """What is handed to the tokenization; rows that hold several texts become several datasets."""
        return opened
