"""Lay out rollouts in rows, and cut their batch into mini-batches of whole prompts.

The number of optimizer steps is prompts_per_step / prompts_per_minibatch x update_epochs, for any number of turns. A
learning-rate schedule therefore does not depend on how many turns attempts have, as in SkyRL's step-wise training. If
each turn has its own row, only the prompt uids say which rows belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spurline.config.run_config import RunConfig
from spurline.data.batch import TrainingBatch
from spurline.data.collators.layout import Segment, turn_segments
from spurline.data.collators.packing import round_up
from spurline.data.collators.reference import PaddedCollator
from spurline.errors import RunFailedError, listing
from spurline.protocols.collator import ParallelLayout
from spurline_rl.training_configs import ByPromptConfig

if TYPE_CHECKING:
    from spurline_rl.trajectory import Trajectory


class RolloutsCollator(PaddedCollator):
    """Lays out one turn per row, with loss on the response tokens whose mask is 1. This is a reference implementation.

    Tokenized samples are laid out as by the collator `padded`, so a run may evaluate on plain text between RL steps.
    """

    def collate_rollouts(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        # Mini-batches are cut between prompts, so rows keep their order. Padding rows come last.
        rows: list[list[Segment]] = [[segment] for segment in turn_segments(trajectories)]
        rows += [[] for _ in range(round_up(max(len(rows), 1), self._layout.data) - len(rows))]
        return self._lay_out(rows)


class ByPrompt:
    """Cuts batches between prompts, and pads each mini-batch to the number of rows that the backend needs."""

    def __init__(self, config: ByPromptConfig, run: RunConfig, layout: ParallelLayout) -> None:
        assert run.source.facts.num_prompts is not None, "the config refuses a source without prompts"
        self._prompts_per_step = run.source.facts.num_prompts
        self._prompts_per_minibatch = config.minibatch_prompts(self._prompts_per_step)
        self._update_epochs = config.update_epochs
        self._row_multiple = layout.row_multiple

    def steps_per_batch(self) -> int:
        return self._prompts_per_step // self._prompts_per_minibatch * self._update_epochs

    def cut(self, batch: TrainingBatch) -> Sequence[TrainingBatch]:
        """Return the mini-batches of all passes over the batch.

        Raises:
            RunFailedError: If the rows of a prompt are not adjacent, or if the number of prompts is wrong.
        """
        real = batch.without_padding_rows()
        prompts = _prompt_rows(real)
        if len(prompts) != self._prompts_per_step:
            raise RunFailedError(
                f"The source's batch has the rows of {len(prompts)} prompts, but source.prompts_per_step is "
                f"{self._prompts_per_step} (last prompt: {[*prompts][-1]!r}). Each draw of a prompt needs its own uid."
            )
        rows = [*prompts.values()]
        size = self._prompts_per_minibatch
        bounds = [(rows[first][0], rows[first + size - 1][1]) for first in range(0, len(rows), size)]
        return [real.between(start, stop).pad_rows(self._row_multiple) for start, stop in bounds] * self._update_epochs


def _prompt_rows(batch: TrainingBatch) -> dict[str, tuple[int, int]]:
    """Return (first row, row after the last) of each prompt. Raises RunFailedError for a row of several prompts."""
    uids = batch.segments["uid"]
    found: dict[str, tuple[int, int]] = {}
    for row in range(batch.num_rows):
        names = set(map(str, uids[row].tolist()))
        if len(names) != 1:
            raise RunFailedError(f"In the source's batch row {row} holds segments of several prompts: {listing(names)}")
        [uid] = names
        first, stop = found.get(uid, (row, row))
        if stop != row:
            raise RunFailedError(
                f"In the source's batch the rows of prompt {uid!r} are apart: row {row} follows another prompt's rows."
            )
        found[uid] = first, row + 1
    return found
