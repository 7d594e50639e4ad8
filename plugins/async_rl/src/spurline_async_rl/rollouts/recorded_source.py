"""Source `recorded_rollouts`: train once more on the very groups that another run trained on.

Nothing is generated, so that a run becomes a pure function of its config and the recording: to find out what a change
of the loss does on equal data, and to prove that training on asynchronous rollouts is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from spurline.builtin.rollouts.draws import Draw
from spurline.builtin.rollouts.group_collection import Collected
from spurline.builtin.rollouts.prompt_source import PromptSource
from spurline.component_state import read_state
from spurline.data.batch import TrainingBatch
from spurline.errors import DataError
from spurline.protocols.backend import Backend
from spurline.rl.group_runner import Outcome
from spurline.run_context import SourceContext
from spurline_async_rl.rollouts.group_records import groups_of
from spurline_async_rl.rollouts.recording import recorded_step
from spurline_async_rl.rollouts.staleness import staleness_metrics
from spurline_async_rl.source_config import RecordedRolloutsConfig


class RecordedRolloutSource(PromptSource):
    """See the module. Its state is the position in the recording, which the step tells."""

    def __init__(self, config: RecordedRolloutsConfig, context: SourceContext) -> None:
        super().__init__(config, context)
        self._config = config

    def start(self, step: int, backend: Backend) -> None:
        self._backend = backend

    def build(self, step: int) -> TrainingBatch:
        """Raises DataError when the recording does not reach this step."""
        path = recorded_step(Path(self._config.recorded), step)
        try:
            groups = tuple(groups_of(read_state(path)))
        except FileNotFoundError as error:
            raise DataError(
                f"source.recorded: {self._config.recorded} has no groups of step {step} ({error.filename}). Record "
                "them with source.record_groups: true, or lower steps."
            ) from error
        collected = Collected(groups, groups, 0, 0, 0, 0)
        ages = staleness_metrics(groups, step - 1, self._config.max_staleness, masked=0)
        batch = self._batch(step, collected, self._backend, retries=0, seconds=0.0)
        return replace(batch, info={**batch.info, **ages})

    def epoch(self, step: int) -> float:
        return step * self._config.prompts_per_step / self._prompts.prompts_per_epoch

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        return {}

    def _run_held_out(self, prompts: Sequence[Draw]) -> Sequence[Outcome]:
        raise AssertionError("its config refuses held-out prompts")

    def close(self) -> None:
        """Nothing was started."""
