"""Built-in tokenization `sequential`: row after row, in this process, into memory.

Rows are encoded in chunks, so the tokenizer's own threads are used. No worker processes, no cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from spurline.builtin.configs import SequentialTokenizationConfig
from spurline.config.run_config import DataConfig
from spurline.data.encoding import RowEncoder
from spurline.data.reading import check_rows
from spurline.data.sample_collector import SampleCollector
from spurline.protocols.tokenization import DatasetToTokenize, Tokenized

ROWS_PER_CALL = 256
"""Rows encoded by one call of the tokenizer."""


class SequentialTokenization:
    """Tokenizes datasets one after another."""

    def __init__(
        self, config: SequentialTokenizationConfig, *, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._tokenizer = tokenizer
        self._data = data

    def tokenize(self, datasets: Sequence[DatasetToTokenize]) -> Tokenized:
        """All samples of all datasets, in order."""
        for dataset in datasets:
            check_rows(dataset.dataset)
        # All before the first row: a format that does not fit the last dataset should not cost the work on the others.
        encoders = [RowEncoder(dataset, self._tokenizer, self._data) for dataset in datasets]
        collector = SampleCollector(datasets)
        for source, encoder in enumerate(encoders):
            num_rows = len(datasets[source].dataset)
            for start in range(0, num_rows, ROWS_PER_CALL):
                rows = range(start, min(start + ROWS_PER_CALL, num_rows))
                collector.add(source, encoder.encode(rows))
        return collector.finish()
