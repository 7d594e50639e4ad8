"""Lay out rollouts in rows, and cut their batch into mini-batches of whole prompts.

The number of optimizer steps is prompts_per_step / prompts_per_minibatch x update_epochs, for any number of turns. A
learning-rate schedule therefore does not depend on how many turns attempts have, as in SkyRL's step-wise training. If
each turn has its own row, only the prompt uids say which rows belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spurline.config.run_config import RunConfig
from spurline.data.batch import ROUTED_EXPERTS, SUPPORT, TrainingBatch
from spurline.data.collators.layout import Segment
from spurline.data.collators.packing import round_up
from spurline.data.collators.reference import PaddedCollator
from spurline.errors import RunFailedError, listing
from spurline.protocols.collator import ParallelLayout
from spurline_rl.training_configs import ByPromptConfig
from spurline_rl.trajectory import Group, Trajectory, Turn, trajectories_of

RESPONSE_COLUMNS = {
    "rollout_logprobs": "logprobs",
    "token_versions": "versions",
    "rewards": "rewards",
    SUPPORT: "support",
}
"""Maps each optional column with values for response tokens to the field of `Turn` that it is copied from."""


class RolloutCollator(Protocol):
    """Lay groups out as one TrainingBatch, one turn per row. Factory and padding are as for `Collator`.

    An optional token column is present if and only if every turn has its values.
    """

    def collate_rollouts(self, groups: Sequence[Group]) -> TrainingBatch:
        """Return one batch with each turn in a row of its own, in order. Padding rows come last.

        `Group.flat` has the turns in flat arrays. A source usually computes them when a group finishes. The batch may
        keep only the uids and numbers of the turns, so that the memory of the tokens can be freed.
        """
        ...


class RolloutsCollator(PaddedCollator):
    """Lays out one turn per row, with loss on the response tokens whose mask is 1. This is a reference implementation.

    Tokenized samples are laid out as by the collator `padded`, so a run may evaluate on plain text between RL steps.
    """

    def collate_rollouts(self, groups: Sequence[Group]) -> TrainingBatch:
        # Mini-batches are cut between prompts, so rows keep their order. Padding rows come last.
        rows = [
            [_segment(turn, trajectory, number)]
            for trajectory in trajectories_of(groups)
            for number, turn in enumerate(trajectory.turns)
        ]
        rows += [[] for _ in range(round_up(max(len(rows), 1), self._layout.data) - len(rows))]
        return self._lay_out(rows)


def _segment(turn: Turn, trajectory: Trajectory, number: int) -> Segment:
    tokens = np.concatenate([turn.prompt_ids, turn.response_ids]).astype(np.int32)
    weights = _after_prompt(turn, turn.loss_mask.astype(np.float32))
    given = {name: getattr(turn, field) for name, field in RESPONSE_COLUMNS.items()}
    extra = {name: _after_prompt(turn, values) for name, values in given.items() if values is not None}
    if turn.routed_experts is not None:
        assert len(turn.routed_experts) == len(tokens), (len(turn.routed_experts), len(tokens))
        extra[ROUTED_EXPERTS] = turn.routed_experts
    return Segment(tokens, weights, 0, trajectory.uid, trajectory.sample, number, extra)


def _after_prompt(turn: Turn, values: NDArray[Any]) -> NDArray[Any]:
    """Return the values of the response after a zero for each prompt token."""
    assert len(values) == len(turn.response_ids), (len(values), len(turn.response_ids))
    return np.concatenate([np.zeros((len(turn.prompt_ids), *values.shape[1:]), values.dtype), values])


class ByPrompt:
    """Cuts batches between prompts, and pads each mini-batch to a number of rows that the backend can distribute."""

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
    """Return (first row, row after the last) of each prompt. Raises RunFailedError for shared or non-adjacent rows."""
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
