"""Finished groups as plain arrays and JSON, for checkpoints and recordings, and back, bit for bit.

The arrays of all turns are joined by field, with the length of each: a few long arrays instead of thousands of short
ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from spurline.rl.trajectory import Group, Trajectory, Turn
from spurline.rl.turns import turns_of

_FIELDS = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "rewards", "routed_experts")
"""What a turn holds before it is prepared for training; values, advantages and returns come afterwards."""
_ABSENT = -1


def groups_state(groups: Sequence[Group]) -> dict[str, object]:
    """Nested dicts and lists of JSON values and arrays, as component state may be."""
    turns = turns_of(groups)
    return {
        "groups": [
            {"uid": group.uid, "draw": group.draw, "trajectories": [_trajectory(item) for item in group.trajectories]}
            for group in groups
        ],
        "finish_reasons": [turn.finish_reason for turn in turns],
        "fields": {name: _joined([getattr(turn, name) for turn in turns]) for name in _FIELDS},
    }


def groups_of(state: Mapping[str, object]) -> list[Group]:
    """The groups that `groups_state` was given."""
    fields = cast("Mapping[str, Mapping[str, Any]]", state["fields"])
    columns = {name: iter(_split(joined)) for name, joined in fields.items()}
    reasons = iter(cast("Sequence[Any]", state["finish_reasons"]))

    def next_turn() -> Turn:
        values: dict[str, Any] = {name: next(column) for name, column in columns.items()}
        return Turn(**values, finish_reason=next(reasons))

    return [
        Group(
            group["uid"],
            group["draw"],
            tuple(
                Trajectory(
                    group["uid"],
                    item["sample"],
                    tuple(next_turn() for _ in range(item["turns"])),
                    item["rewards"],
                    json.loads(item["info"]),
                )
                for item in group["trajectories"]
            ),
        )
        for group in cast("Sequence[Mapping[str, Any]]", state["groups"])
    ]


def _trajectory(trajectory: Trajectory) -> dict[str, object]:
    return {
        "sample": trajectory.sample,
        "turns": len(trajectory.turns),
        "rewards": {name: float(value) for name, value in trajectory.rewards.items()},
        # As text: what an environment wants logged may look like anything, also like an array of this state.
        "info": json.dumps(dict(trajectory.info), default=str),
    }


def _joined(arrays: Sequence[NDArray[Any] | None]) -> dict[str, object]:
    present = [array for array in arrays if array is not None]
    lengths = np.array([_ABSENT if array is None else len(array) for array in arrays], np.int64)
    if not present:
        return {"lengths": lengths}
    return {"lengths": lengths, "values": np.concatenate(present)}


def _split(joined: Mapping[str, Any]) -> list[NDArray[Any] | None]:
    lengths = [int(length) for length in joined["lengths"]]
    values = joined.get("values")
    start = 0
    arrays: list[NDArray[Any] | None] = []
    for length in lengths:
        if length == _ABSENT or values is None:
            arrays.append(None)
            continue
        arrays.append(values[start : start + length].copy())
        start += length
    return arrays
