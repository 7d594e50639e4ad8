"""What advantages share that differ from token to token: a trajectory's turns as one sequence of decisions.

Every response token is a decision, whether it is trained or not; prompts between the turns are none. Hence this comes
before turns are merged into one row, which turns those prompts into response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError
from spurline.rl.trajectory import Group, Trajectory

Sequences = list[NDArray[np.float64]]


def read_tokens(groups: Sequence[Group], name: Literal["rewards", "values", "loss_mask"]) -> Sequences:
    """A field of the turns for each trajectory of all groups in order, turns joined, float64."""
    return [_joined(trajectory, name) for group in groups for trajectory in group.trajectories]


def write_tokens(groups: Sequence[Group], **fields: Sequences) -> list[Group]:
    """The groups with fields of their turns set to float32 values laid out as `read_tokens` gives them."""
    rest = {name: iter(sequences) for name, sequences in fields.items()}
    return [
        replace(
            group,
            trajectories=tuple(
                _with_fields(trajectory, {name: next(sequences) for name, sequences in rest.items()})
                for trajectory in group.trajectories
            ),
        )
        for group in groups
    ]


def discounted_sums(sequences: Sequences, factor: float) -> Sequences:
    """y[t] = x[t] + factor * y[t + 1] for each sequence x, with 0 after its end."""
    longest = max((len(sequence) for sequence in sequences), default=0)
    # One column per sequence: all of them take a step back in time together.
    sums = np.zeros((longest, len(sequences)))
    for column, sequence in enumerate(sequences):
        sums[: len(sequence), column] = sequence
    for position in range(longest - 2, -1, -1):
        sums[position] += factor * sums[position + 1]
    return [sums[: len(sequence), column] for column, sequence in enumerate(sequences)]


def normalized(sequences: Sequences, masks: Sequences, eps: float) -> Sequences:
    """Minus the mean, over (standard deviation + eps), both over the tokens of all sequences whose mask is not 0."""
    counted = np.concatenate(
        [np.empty(0), *(sequence[mask != 0] for sequence, mask in zip(sequences, masks, strict=True))]
    )
    if len(counted) == 0:
        return sequences
    mean, std = counted.mean(), counted.std()
    return [(sequence - mean) / (std + eps) for sequence in sequences]


def _joined(trajectory: Trajectory, name: str) -> NDArray[np.float64]:
    parts = [np.empty(0)]
    for number, turn in enumerate(trajectory.turns):
        values = getattr(turn, name)
        if values is None:
            raise DataError(
                f"Turn {number} of sample {trajectory.sample} of prompt '{trajectory.uid}' has no {name}, which the "
                "advantage needs. Choose another `advantage`, or a `source` that provides them."
            )
        parts.append(values.astype(np.float64))
    return np.concatenate(parts)


def _with_fields(trajectory: Trajectory, fields: dict[str, NDArray[np.float64]]) -> Trajectory:
    ends = np.cumsum([len(turn.response_ids) for turn in trajectory.turns])
    cut = {name: np.split(values.astype(np.float32), ends[:-1]) for name, values in fields.items()}
    turns = tuple(
        replace(turn, **{name: parts[number] for name, parts in cut.items()})
        for number, turn in enumerate(trajectory.turns)
    )
    return replace(trajectory, turns=turns)
