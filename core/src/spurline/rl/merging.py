"""Join the turns of a trajectory into one, where each turn's prompt goes on from the last turn's tokens.

Place on the way: trajectory -> this -> rollouts collator. One row instead of one per turn, so that shared context is
computed once. Tokens that came between the model's turns (a user's or a tool's message) become response tokens without
loss; advantages that walk along the response tokens are therefore computed before turns are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.rl.trajectory import Trajectory, Turn

_PER_RESPONSE_TOKEN = ("logprobs", "versions", "rewards", "advantages", "values", "returns")


def merge_turns(trajectory: Trajectory) -> Trajectory:
    """The same trajectory with a single turn, or as it is when some turn does not go on from the one before.

    Per-token values of the tokens in between are 0; what some turn lacks, the merged one lacks. Routed experts and the
    finish reason are those of the last turn, which saw all tokens.
    """
    turns = trajectory.turns
    if len(turns) < 2 or not all(_goes_on(before, after) for before, after in pairwise(turns)):
        return trajectory
    last = turns[-1]
    context = np.concatenate([last.prompt_ids, last.response_ids])
    first_prompt = len(turns[0].prompt_ids)
    merged = replace(
        last,
        prompt_ids=context[:first_prompt],
        response_ids=context[first_prompt:],
        loss_mask=_joined(turns, [turn.loss_mask for turn in turns]),
        **{name: _joined_column(turns, name) for name in _PER_RESPONSE_TOKEN},
    )
    return replace(trajectory, turns=(merged,))


def _goes_on(before: Turn, after: Turn) -> bool:
    """Whether the later turn's prompt begins with everything the model had seen and written."""
    seen = np.concatenate([before.prompt_ids, before.response_ids])
    return np.array_equal(after.prompt_ids[: len(seen)], seen)


def _joined_column(turns: Sequence[Turn], name: str) -> NDArray[Any] | None:
    columns = [getattr(turn, name) for turn in turns]
    return None if any(column is None for column in columns) else _joined(turns, columns)


def _joined(turns: Sequence[Turn], columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The values of all turns, with zeros for the tokens between a turn's response and the next one."""
    parts = [columns[0]]
    for (before, after), column in zip(pairwise(turns), columns[1:], strict=True):
        between = len(after.prompt_ids) - len(before.prompt_ids) - len(before.response_ids)
        parts += [np.zeros(between, column.dtype), column]
    return np.concatenate(parts)
