"""Helpers of advantage algorithms: compare the samples of a prompt, and compute along the tokens of a trajectory.

An algorithm that compares samples computes one number per trajectory, and gives this number to all tokens:

    class Centred:
        needs: frozenset[str] = frozenset()

        def advantages(self, groups):
            return [spread_over_tokens(group, relative_to_group(group, "centred", center)) for group in groups]

An algorithm whose advantages differ from token to token uses `read_tokens` and `write_tokens`. They join all response
tokens of a trajectory's turns into one sequence, including tokens that are not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError
from spurline_rl.trajectory import Group, Trajectory, has_equal_returns, trajectories_of, turns_of, with_turns

Returns = NDArray[np.float64]
Sequences = list[NDArray[np.float64]]


def center(returns: Returns) -> Returns:
    """Subtract the mean of a group's returns from each return."""
    return returns - returns.mean()


def relative_to_group(group: Group, name: str, rule: Callable[[Returns], Returns]) -> Returns:
    """Apply a rule to the group's returns, float64 [n]. The result is exactly 0 if all returns are equal.

    Args:
        name: The name of the algorithm for messages.
        rule: A function that takes the returns, and returns the advantages.

    Raises:
        DataError: If the group has only one sample.
    """
    returns = group.returns
    if len(returns) < 2:
        raise DataError(
            f"The group of prompt '{group.uid}' has {len(returns)} sample(s), but {name} compares the samples of a "
            "prompt with each other. Set source.samples_per_prompt to 2 or more (8 is usual), or choose an advantage "
            "that needs no group: reinforce_pp with baseline: batch, or gae."
        )
    return np.zeros_like(returns) if has_equal_returns(group) else rule(returns)


def spread_over_tokens(group: Group, advantages: Returns) -> Group:
    """Write the advantage of each trajectory to all response tokens of its turns, as float32."""
    turns = [
        replace(turn, advantages=np.full(len(turn.response_ids), value, dtype=np.float32))
        for trajectory, value in zip(group.trajectories, advantages.tolist(), strict=True)
        for turn in trajectory.turns
    ]
    return with_turns([group], turns)[0]


def spread_over_groups(groups: Sequence[Group], advantages: Sequence[Returns]) -> list[Group]:
    """Call `spread_over_tokens` for each group."""
    return [spread_over_tokens(group, values) for group, values in zip(groups, advantages, strict=True)]


def read_tokens(groups: Sequence[Group], name: Literal["rewards", "values", "loss_mask"]) -> Sequences:
    """Return a field of the response tokens as float64, with one sequence for each trajectory of all groups."""
    return [_join_turns(trajectory, name) for trajectory in trajectories_of(groups)]


def write_tokens(groups: Sequence[Group], **fields: Sequences) -> list[Group]:
    """Set fields of the turns to values in the order of `read_tokens`, as float32."""
    turns = turns_of(groups)
    ends = np.cumsum([len(turn.response_ids) for turn in turns])
    cut = {
        name: np.split(np.concatenate([np.empty(0), *sequences]).astype(np.float32), ends[:-1])
        for name, sequences in fields.items()
    }
    written = [
        replace(turn, **{name: parts[number] for name, parts in cut.items()}) for number, turn in enumerate(turns)
    ]
    return with_turns(groups, written)


def discounted_sums(sequences: Sequences, factor: float) -> Sequences:
    """Return y[t] = x[t] + factor * y[t + 1] for each sequence x. After the end of x, y is 0."""
    longest = max((len(sequence) for sequence in sequences), default=0)
    # One column per sequence, so that each step of the loop computes a token of all sequences.
    sums = np.zeros((longest, len(sequences)))
    for column, sequence in enumerate(sequences):
        sums[: len(sequence), column] = sequence
    for position in range(longest - 2, -1, -1):
        sums[position] += factor * sums[position + 1]
    return [sums[: len(sequence), column] for column, sequence in enumerate(sequences)]


def normalized(sequences: Sequences, masks: Sequences, eps: float) -> Sequences:
    """Subtract the mean and divide by (standard deviation + eps), both over all tokens whose mask is not 0."""
    counted = np.concatenate(
        [np.empty(0), *(sequence[mask != 0] for sequence, mask in zip(sequences, masks, strict=True))]
    )
    if len(counted) == 0:
        return sequences
    mean, std = counted.mean(), counted.std()
    return [(sequence - mean) / (std + eps) for sequence in sequences]


def _join_turns(trajectory: Trajectory, name: str) -> NDArray[np.float64]:
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
