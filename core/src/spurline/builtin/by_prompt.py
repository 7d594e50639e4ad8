"""Mini-batches `by_prompt`: cut a batch of rollouts between prompts, counting prompts and never rows.

The number of optimizer steps is prompts_per_step / prompts_per_minibatch x update_epochs, whatever the number of turns
and rows, so a learning-rate schedule never drifts (semantics of SkyRL's step-wise training).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from spurline.builtin.configs import ByPromptConfig
from spurline.config.run_config import RunConfig
from spurline.data.batch import TrainingBatch
from spurline.data.prompt_boundaries import prompt_boundaries
from spurline.errors import RunFailedError
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.source_config import PromptSourceConfig


class ByPrompt:
    """Each mini-batch is padded on its own to the data-parallel size."""

    def __init__(self, config: ByPromptConfig, run: RunConfig, layout: ParallelLayout) -> None:
        self._prompts_per_step = cast("PromptSourceConfig", run.source).prompts_per_step
        self._prompts_per_minibatch = config.prompts_per_minibatch or self._prompts_per_step
        self._update_epochs = config.update_epochs
        self._layout = layout

    def steps_per_batch(self) -> int:
        return self._prompts_per_step // self._prompts_per_minibatch * self._update_epochs

    def cut(self, batch: TrainingBatch) -> Sequence[TrainingBatch]:
        real = batch.without_padding_rows()
        parts = [real.take(range(start, stop)).pad_rows(self._layout.data) for start, stop in self.pairs(real)]
        return parts * self._update_epochs

    def pairs(self, batch: TrainingBatch) -> list[tuple[int, int]]:
        """(first row, row after the last) of each mini-batch of one pass over the batch.

        Raises RunFailedError naming the prompt when rows of a prompt are apart, or when there are too few or too many.
        """
        try:
            prompts = prompt_boundaries(batch)
        except ValueError as error:
            raise RunFailedError(f"The source's batch cannot be cut between prompts: {error}.") from error
        if len(prompts) != self._prompts_per_step:
            raise RunFailedError(
                f"The source's batch has the rows of {len(prompts)} prompts, and source.prompts_per_step is "
                f"{self._prompts_per_step} (last prompt: {prompts[-1][0]!r}). "
                "A prompt drawn twice in one step needs a uid of its own each time."
            )
        size = self._prompts_per_minibatch
        return [(prompts[first][1], prompts[first + size - 1][2]) for first in range(0, len(prompts), size)]
