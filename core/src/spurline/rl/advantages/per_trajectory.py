"""What advantages share that compare the samples of a prompt: one number per trajectory, the same for all its tokens.

class Centred:
    needs: frozenset[str] = frozenset()

    def advantages(self, groups):
        return [spread_over_tokens(g, relative_to_group(g, "centred", lambda r: r - r.mean())) for g in groups]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError
from spurline.rl.returns import are_equal, group_returns
from spurline.rl.trajectory import Group

Returns = NDArray[np.float64]


def relative_to_group(group: Group, name: str, rule: Callable[[Returns], Returns]) -> Returns:
    """`rule` applied to the group's returns, both float64 [n]; exactly 0 where all returns are equal.

    name: the algorithm's, for the message. Raises DataError for a group of one, which has nothing to compare with.
    """
    returns = group_returns(group)
    if len(returns) < 2:
        raise DataError(
            f"The group of prompt '{group.uid}' has {len(returns)} sample(s), but {name} compares the samples of a "
            "prompt with each other. Set source.samples_per_prompt to 2 or more (8 is usual), or choose an advantage "
            "that needs no group: reinforce_pp with baseline: batch, or gae."
        )
    return np.zeros_like(returns) if are_equal(returns) else rule(returns)


def spread_over_tokens(group: Group, advantages: Returns) -> Group:
    """The group with one advantage per trajectory written to every response token of every turn, as float32."""
    trajectories = tuple(
        replace(
            trajectory,
            turns=tuple(
                replace(turn, advantages=np.full(len(turn.response_ids), value, dtype=np.float32))
                for turn in trajectory.turns
            ),
        )
        for trajectory, value in zip(group.trajectories, advantages.tolist(), strict=True)
    )
    return replace(group, trajectories=trajectories)
