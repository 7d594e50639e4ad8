"""Dr. GRPO: GRPO done right (Liu et al. 2025, arXiv:2503.20783).

    A_i = R_i - mean(R)

over the samples of a prompt, the same for every token of sample i. Without the division by the standard deviation,
prompts that nearly all or nearly no samples solve no longer weigh more than others. The paper's other half, a divisor
that does not depend on the answer's length, is `reduction: fixed_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spurline.rl.advantages.per_trajectory import relative_to_group, spread_over_tokens
from spurline.rl.trajectory import Group

if TYPE_CHECKING:
    from spurline.rl.advantages.configs import DrGrpoConfig


class DrGrpo:
    """Return relative to the group's mean."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: DrGrpoConfig):
        self.config = config

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        return [
            spread_over_tokens(group, relative_to_group(group, "dr_grpo", lambda returns: returns - returns.mean()))
            for group in groups
        ]

    def describe(self) -> str:
        return "Dr. GRPO: each sample's return minus the mean of its prompt's samples."
