"""Source `scored_steps`: answers in steps, with a label for each step, as TRL's data for process reward models.

Data flow: row {prompt, completions, labels} -> `StepRows`: tokens with a mark at each step's last token -> tokenization
-> collator -> `StepSet.batch` adds the column `step_labels` at the marks -> TrainingBatch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline.data.batch import TrainingBatch
from spurline.data.token_store import fingerprint_of
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.source import Samples, SourceContext
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_reward_models.configs import SaysKindOfLabel, ScoredStepsConfig
from spurline_text.rows.rows import BadRowError, RowView, describe
from spurline_text.sources.sft import SampleSet, SftSource
from spurline_text.tokenization import DerivedDataset

_VERSION = "/1"
"""Part of the fingerprint. It must change with the tokens that `StepRows` makes of a row."""


class StepRows(DerivedDataset):
    """A `Dataset` whose rows have tokens, and a mask that is 1 at the last token of each scored step."""

    def __init__(
        self,
        source: DatasetToTokenize,
        config: ScoredStepsConfig,
        tokenizer: PreTrainedTokenizerBase,
        kind_of_label: str,
    ) -> None:
        super().__init__(source.dataset)
        columns = dict(source.config.columns)
        self._config, self._columns, self._tokenizer, self._kind = config, columns, tokenizer, kind_of_label

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        view = RowView(self._dataset[row], self._columns)
        try:
            prompt, steps, labels = read_steps(view)
            if self._kind == "probability" and not all(0 <= label <= 1 for label in labels):
                raise BadRowError(
                    view.label("labels"),
                    "has a label that is not a probability from 0 to 1. Correct it, or train on any numbers with loss: "
                    "{name: step_reward, kind_of_label: number}.",
                )
        except BadRowError as error:
            raise error.at(self._dataset.location(row)) from error
        tokens, mask = self._prompt_ids(prompt), list[int]()
        mask += [0] * len(tokens)
        for number, step in enumerate(steps, start=1):
            ids = self._tokenizer.encode(step + self._config.separator, add_special_tokens=False)
            tokens += ids
            is_scored = self._config.scored == "all" or number == len(steps)
            mask += [0] * (len(ids) - 1) + [int(is_scored)]
        return {"input_ids": tokens, "loss_mask": mask}

    def labels(self, row: int) -> list[float]:
        """Return the labels of the scored steps."""
        _, _, labels = read_steps(RowView(self._dataset[row], self._columns))
        return labels if self._config.scored == "all" else labels[-1:]

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt))
        ids: Any = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        return list(ids)

    def fingerprint(self) -> str:
        settings = [self._config.separator, self._config.scored, self._kind, sorted(self._columns.items())]
        return fingerprint_of([self._dataset.fingerprint(), json.dumps(settings), _VERSION])


def read_steps(view: RowView) -> tuple[Any, list[str], list[float]]:
    """Return the prompt, the texts of the steps, and a label for each. Raises BadRowError for other rows."""
    prompt, steps, labels = view.require("prompt"), view.require("completions"), view.require("labels")
    if not isinstance(steps, (list, tuple, np.ndarray)) or not all(isinstance(step, str) for step in steps):
        raise BadRowError(view.label("completions"), f"is {describe(steps)}, expected a list of texts, one per step.")
    if not isinstance(labels, (list, tuple, np.ndarray)) or len(labels) != len(steps) or not len(steps):
        expected = f"expected a list of {len(steps)} labels, one per step."
        raise BadRowError(view.label("labels"), f"is {describe(labels)}, {expected}")
    for label in labels:
        if not isinstance(label, (int, float, np.bool_, np.number)) or not math.isfinite(label):
            raise BadRowError(
                view.label("labels"), f"has a label that is {describe(label)}, expected a finite number, true or false."
            )
    return prompt, list(steps), [float(label) for label in labels]


class StepSet(SampleSet):
    """A `SampleSet` whose batches have the column `step_labels`."""

    def __init__(self, config: ScoredStepsConfig, datasets: Sequence[DatasetConfig], context: SourceContext) -> None:
        self._config, self._tokenizer = config, context.tokenizer
        loss = context.config.loss
        self._kind = loss.kind_of_label if isinstance(loss, SaysKindOfLabel) else "number"
        super().__init__(datasets, context)

    def batch(self, numbers: NDArray[np.int64], *, training: bool) -> TrainingBatch:
        store = self._tokenized.store
        of_sample = {
            store.uid(number): (int(store.source[number]), int(store.row[number])) for number in numbers.tolist()
        }
        batch = super().batch(numbers, training=training)
        column = torch.zeros(batch.num_rows, batch.length)
        ids, marked = batch.tokens["segment_ids"], batch.tokens["loss_weights"] != 0
        uids = batch.segments["uid"]
        for row in range(batch.num_rows):
            for segment, uid in enumerate(uids[row].tolist(), start=1):
                dataset, line = of_sample[uid]
                rows = self._sources[dataset].dataset
                assert isinstance(rows, StepRows)
                places = torch.nonzero((ids[row] == segment) & marked[row]).flatten()
                # A truncated answer has lost its last steps.
                column[row, places] = torch.tensor(rows.labels(line)[: len(places)])
        return batch.with_tokens(step_labels=column)

    def fingerprint(self) -> str:
        labels = [f"{source.dataset.fingerprint()}" for source in self._sources]
        return fingerprint_of([super().fingerprint(), *labels])

    def _to_tokenize(self, opened: Sequence[DatasetToTokenize]) -> Sequence[DatasetToTokenize]:
        return [
            DatasetToTokenize(
                StepRows(source, self._config, self._tokenizer, self._kind),
                source.config.model_copy(update={"format": "pretokenized", "columns": {}}),
            )
            for source in opened
        ]


class ScoredStepsSource(SftSource):
    """A source whose samples are answers with labelled steps, in the orders of the source `sft`."""

    def __init__(self, config: ScoredStepsConfig, context: SourceContext) -> None:
        self._config, self._context = config, context
        super().__init__(config, context, StepSet(config, context.config.data.train, context))

    def held_out(self, datasets: Sequence[DatasetConfig]) -> Samples:
        return StepSet(self._config, datasets, self._context)
