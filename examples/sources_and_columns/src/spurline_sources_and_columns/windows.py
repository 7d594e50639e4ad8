"""Define the source `windows`, which joins texts to one stream of tokens and cuts it into windows of equal length.

The batch of a step is a pure function of the config and the step. So the source has no state that changes, and a
resumed run only needs the same data.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from spurline.data.batch import TrainingBatch
from spurline.data.token_store import Tokenized, TokenStoreBuilder, summarize
from spurline.errors import DataError
from spurline.protocols.collator import Collator
from spurline.protocols.source import BatchSource, SourceContext
from spurline.protocols.stateful import refuse_other_data
from spurline_sources_and_columns.config import WindowsConfig
from spurline_text.tokenization import open_datasets
from spurline_text.tokenizer import pad_token_id


class Windows(BatchSource):
    """Reads all rows in its constructor. Batches have the windows in order, and begin again after the last window."""

    pure = True

    def __init__(self, config: WindowsConfig, context: SourceContext) -> None:
        run, registry = context.config, context.host.registry
        self._batch_size = run.batch_size
        tokens = _stream(config, context)
        builder = TokenStoreBuilder(["windows"])
        for number in range(len(tokens) // config.window_tokens):
            window = tokens[number * config.window_tokens : (number + 1) * config.window_tokens]
            # The model does not predict the first token of a sample, so this token has no loss.
            builder.add(window, [0] + [1] * (len(window) - 1), source=0, row=number)
        self._store = builder.build()
        if not len(self._store):
            raise DataError(
                f"The texts have {len(tokens)} tokens, but one window needs {config.window_tokens}. Lower "
                "source.window_tokens, or add rows to data.train."
            )
        self._collator: Collator = registry.create(
            "collator", run.collator, pad_token_id=pad_token_id(context.tokenizer), layout=context.layout
        )
        self.total_steps = run.total_steps(len(self._store))

    def summary(self) -> Mapping[str, object]:
        return {**summarize(Tokenized(self._store)), "samples_per_epoch": len(self._store)}

    def build(self, step: int) -> TrainingBatch:
        first = (step - 1) * self._batch_size
        numbers = np.arange(first, first + self._batch_size, dtype=np.int64) % len(self._store)
        return self._collator.collate(self._store.view(numbers), training=True)

    def epoch(self, step: int) -> float:
        return step * self._batch_size / len(self._store)

    def state_dict(self) -> dict[str, object]:
        return {"data": self._store.fingerprint}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        refuse_other_data(
            state,
            self._store.fingerprint,
            "The windows differ from the windows of the checkpoint. Restore the data and the tokenizer, or start a "
            "new run with another run_dir.",
        )


def _stream(config: WindowsConfig, context: SourceContext) -> list[int]:
    """Return the tokens of all texts, with an end-of-sequence token after each text."""
    tokens: list[int] = []
    for opened in open_datasets(context.config.data.train, context.host.registry, context.row_limit):
        dataset = opened.dataset
        for number in range(len(dataset)):
            text = dataset[number].get(config.column)
            if not isinstance(text, str):
                raise DataError(
                    f"{dataset.location(number)}: has no text in the column '{config.column}'. Name the column with "
                    f"source.column. The row has: {', '.join(dataset[number])}."
                )
            tokens += context.tokenizer.encode(text, add_special_tokens=False)
            if context.tokenizer.eos_token_id is not None:
                tokens.append(context.tokenizer.eos_token_id)
    return tokens
