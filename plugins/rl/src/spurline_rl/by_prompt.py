"""Mini-batches `by_prompt`, which cut a batch of rollouts between prompts.

They count prompts and never rows: the number of optimizer steps is prompts_per_step / prompts_per_minibatch x
update_epochs, whatever the number of turns, so a learning-rate schedule never drifts (semantics of SkyRL's step-wise
training). Step-wise training makes one row per turn, so nothing but the prompt uids says which rows belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from spurline.config.run_config import RunConfig
from spurline.data.batch import TrainingBatch
from spurline.errors import RunFailedError
from spurline.protocols.collator import ParallelLayout
from spurline_rl.training_configs import ByPromptConfig


class ByPrompt:
    """Each mini-batch is padded on its own to the data-parallel size, where the backend wants it."""

    def __init__(self, config: ByPromptConfig, run: RunConfig, layout: ParallelLayout) -> None:
        assert run.source.facts.num_prompts is not None, "the config refuses a source without prompts"
        self._prompts_per_step = run.source.facts.num_prompts
        self._prompts_per_minibatch = config.minibatch_prompts(self._prompts_per_step)
        self._update_epochs = config.update_epochs
        self._row_multiple = layout.row_multiple

    def steps_per_batch(self) -> int:
        return self._prompts_per_step // self._prompts_per_minibatch * self._update_epochs

    def cut(self, batch: TrainingBatch) -> Sequence[TrainingBatch]:
        real = batch.without_padding_rows()
        parts = [real.between(start, stop).pad_rows(self._row_multiple) for start, stop in self.pairs(real)]
        return parts * self._update_epochs

    def pairs(self, batch: TrainingBatch) -> list[tuple[int, int]]:
        """(first row, row after the last) of each mini-batch of one pass over the batch.

        Raises:
            RunFailedError: Names the prompt when rows of a prompt are apart, or when there are too few or too many.
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


def prompt_boundaries(batch: TrainingBatch) -> list[tuple[str, int, int]]:
    """(uid, first row, row after the last) of each prompt, in row order; padding rows must be gone.

    Rows of one prompt must be neighbours, and all segments of a row must be of one prompt: a ValueError names the uid
    for which that is not so.
    """
    assert not bool(batch.is_padding_row.any()), "padding rows belong to no prompt"
    uids = batch.segments["uid"]
    names, offsets = uids.values, uids.offsets
    is_first = np.ones(len(names), np.bool_)
    is_first[1:] = names[1:] != names[:-1]
    starts = np.flatnonzero(is_first)
    rows = np.searchsorted(offsets, starts)
    for row in (rows[offsets[rows] != starts] - 1).tolist():
        several = sorted(set(uids[row].tolist()))
        raise ValueError(f"row {row} holds segments of several prompts: {', '.join(map(str, several))}")
    found: dict[str, tuple[int, int]] = {}
    for uid, (row, stop) in zip(names[starts].tolist(), pairwise([*rows.tolist(), batch.num_rows]), strict=True):
        if uid in found:
            raise ValueError(
                f"the rows of prompt {uid!r} are not neighbours: row {row} comes after another prompt's rows"
            )
        found[uid] = row, stop
    return [(uid, *rows) for uid, rows in found.items()]
