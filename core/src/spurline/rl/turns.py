"""All turns of some groups as one list, in training order, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from spurline.rl.trajectory import Group, Trajectory, Turn


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
    """Every trajectory, group after group."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def turns_of(groups: Iterable[Group]) -> list[Turn]:
    """Every turn of every trajectory, group after group."""
    return [turn for trajectory in trajectories_of(groups) for turn in trajectory.turns]


def with_turns(groups: Sequence[Group], turns: Sequence[Turn]) -> list[Group]:
    """The same groups with their turns replaced, given in the order of `turns_of`."""
    remaining = iter(turns)
    replaced = [
        replace(
            group,
            trajectories=tuple(
                replace(trajectory, turns=tuple(next(remaining) for _ in trajectory.turns))
                for trajectory in group.trajectories
            ),
        )
        for group in groups
    ]
    assert next(remaining, None) is None, "more turns than the groups have"
    return replaced
