"""Sources `preference` and `labels`: answers that are better or worse, in an order that is known before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from spurline.protocols.backend import Backend
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.source import Samples, SourceContext
from spurline_preference.answer_sets import AnswerSet, LabelSet, PairSet
from spurline_preference.configs import AnswerSourceConfig
from spurline_preference.reference import FOLDER
from spurline_text.sources.sft import SftSource


class AnswerSource(SftSource):
    """A source of answers. It orders them as the source `sft` orders its samples."""

    samples_class: ClassVar[type[AnswerSet]]
    records = (FOLDER,)

    def __init__(self, config: AnswerSourceConfig, context: SourceContext) -> None:
        self._context = context
        self._stores_reference = config.reference == "precompute"
        self._unit = config.supplies
        train = self.samples_class(context.config.data.train, context)
        self._sets = [train]
        super().__init__(config, context, train)

    def summary(self) -> Mapping[str, object]:
        return {**super().summary(), "step_of": f"{self._batch_size} {self._unit}"}

    def start(self, step: int, backend: Backend) -> None:
        if self._stores_reference:
            # Before the first step the policy is the reference model, so no second model is loaded.
            role = "policy" if step == 1 else "reference"
            for samples in self._sets:
                samples.add_reference(backend, role, self._batch_size)

    def held_out(self, datasets: Sequence[DatasetConfig]) -> Samples:
        self._sets.append(self.samples_class(datasets, self._context))
        return self._sets[-1]


class PreferenceSource(AnswerSource):
    """The source `preference`."""

    samples_class = PairSet


class LabelSource(AnswerSource):
    """The source `labels`."""

    samples_class = LabelSet
