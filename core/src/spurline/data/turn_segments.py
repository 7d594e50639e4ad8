"""Turn trajectories into segments, one per turn: what the reference collators of rollouts share.

Place on the way: Trajectory -> Segment -> `lay_out` -> TrainingBatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.layout import Segment
from spurline.rl.trajectory import Trajectory, Turn


def turn_segments(trajectories: Sequence[Trajectory]) -> list[Segment]:
    """One segment per turn, in order, all at column 0; collators move them with `dataclasses.replace`."""
    return [
        _segment(turn, trajectory.uid, trajectory.sample, number)
        for trajectory in trajectories
        for number, turn in enumerate(trajectory.turns)
    ]


def turn_name(uid: str, sample: int, turn: int) -> str:
    """What messages call a turn."""
    return f"Turn {turn} of sample {sample} of prompt {uid}"


def _segment(turn: Turn, uid: str, sample: int, number: int) -> Segment:
    tokens = np.concatenate([turn.prompt_ids, turn.response_ids]).astype(np.int32)
    weights = _after_prompt(turn, turn.loss_mask.astype(np.float32))
    return Segment(tokens, weights, 0, uid, sample, number, _extra(turn))


def _extra(turn: Turn) -> dict[str, NDArray[Any]]:
    per_response = {
        "rollout_logprobs": turn.logprobs,
        "token_versions": turn.versions,
        "rewards": turn.rewards,
        "advantages": turn.advantages,
        "values": turn.values,
        "returns": turn.returns,
    }
    extra = {name: _after_prompt(turn, values) for name, values in per_response.items() if values is not None}
    if turn.routed_experts is not None:
        num_tokens = len(turn.prompt_ids) + len(turn.response_ids)
        assert len(turn.routed_experts) == num_tokens, (len(turn.routed_experts), num_tokens)
        extra["routed_experts"] = turn.routed_experts
    return extra


def _after_prompt(turn: Turn, values: NDArray[Any]) -> NDArray[Any]:
    """Response values with zeros for the prompt in front."""
    assert len(values) == len(turn.response_ids), (len(values), len(turn.response_ids))
    return np.concatenate([np.zeros(len(turn.prompt_ids), values.dtype), values])
