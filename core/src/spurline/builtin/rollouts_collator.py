"""Collator `rollouts`: one turn of a trajectory per row. The readable reference.

Also collates tokenized samples as `padded` does, so that a run may evaluate on plain text between RL steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.builtin.padded_collator import PaddedCollator
from spurline.data.batch import TrainingBatch
from spurline.data.layout import Segment, lay_out
from spurline.data.packing import round_up
from spurline.rl.trajectory import Trajectory, Turn


class RolloutsCollator(PaddedCollator):
    """prompt + response per row; loss on the response tokens whose mask is 1."""

    def collate_rollouts(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        turns = [
            (trajectory, number, turn) for trajectory in trajectories for number, turn in enumerate(trajectory.turns)
        ]
        longest = max((len(turn.prompt_ids) + len(turn.response_ids) for _, _, turn in turns), default=1)
        length = round_up(longest, math.lcm(self._config.pad_to_multiple_of, self._layout.align_to))
        rows = [
            [_segment(turn, trajectory.uid, trajectory.sample, number, length, self._config.pad_side)]
            for trajectory, number, turn in turns
        ]
        # Rows keep their order: the prompt boundaries of mini-batches depend on it.
        return lay_out(rows, length, self._pad_token_id).pad_rows(self._layout.data)


def _segment(turn: Turn, uid: str, sample: int, number: int, length: int, pad_side: str) -> Segment:
    tokens = np.concatenate([turn.prompt_ids, turn.response_ids]).astype(np.int32)
    start = length - len(tokens) if pad_side == "left" else 0
    return Segment(
        tokens, _after_prompt(turn, turn.loss_mask.astype(np.float32)), start, uid, sample, number, _extra(turn)
    )


def _extra(turn: Turn) -> dict[str, NDArray[Any]]:
    per_response = {
        "rollout_logprobs": turn.logprobs,
        "token_versions": turn.versions,
        "rewards": turn.rewards,
        "advantages": turn.advantages,
        "values": turn.values,
    }
    extra = {name: _after_prompt(turn, values) for name, values in per_response.items() if values is not None}
    if turn.routed_experts is not None:
        extra["routed_experts"] = turn.routed_experts
    return extra


def _after_prompt(turn: Turn, values: NDArray[Any]) -> NDArray[Any]:
    """Response values with zeros for the prompt in front."""
    assert len(values) == len(turn.response_ids), (len(values), len(turn.response_ids))
    return np.concatenate([np.zeros(len(turn.prompt_ids), values.dtype), values])
