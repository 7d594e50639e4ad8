"""Sources `preference` and `labels`: answers that are better or worse, in an order that is known before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from spurline.errors import CheckpointError
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
        self._reference = ""
        """Name of the stored log-probabilities of the training data, if there are some."""
        train = self.samples_class(context.config.data.train, context)
        self._sets = [train]
        super().__init__(config, context, train)

    def summary(self) -> Mapping[str, object]:
        return {**super().summary(), "step_of": f"{self._batch_size} {self._unit}"}

    def start(self, step: int, backend: Backend) -> None:
        if self._stores_reference:
            # Before the first step the policy is the default reference model, so no second model is loaded.
            is_policy = step == 1 and "reference" not in self._context.config.model.frozen
            role = "policy" if is_policy else "reference"
            names = [samples.add_reference(backend, role, self._batch_size) for samples in self._sets]
            if self._reference not in ("", names[0]):
                raise CheckpointError(
                    "source.reference: the reference model, the tokens, or settings of the backend differ from those "
                    "of the checkpoint. Restore them, or start again with another run_dir."
                )
            self._reference = names[0]

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "reference": self._reference}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        super().load_state_dict(state)
        self._reference = str(state.get("reference", ""))

    def held_out(self, datasets: Sequence[DatasetConfig]) -> Samples:
        self._sets.append(self.samples_class(datasets, self._context))
        return self._sets[-1]


class PreferenceSource(AnswerSource):
    """The source `preference`."""

    samples_class = PairSet


class LabelSource(AnswerSource):
    """The source `labels`."""

    samples_class = LabelSet
