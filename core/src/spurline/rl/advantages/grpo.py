"""GRPO: group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

    A_i = (R_i - mean(R)) / (std(R) + eps)

over the n samples of a prompt, the same for every token of sample i. std is the sample standard deviation (n - 1 in
the denominator), as the trainers in use compute it; the paper leaves it open. With `normalize_std: false` this is
`dr_grpo`. Groups whose returns are all equal get exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spurline.rl.advantages.per_trajectory import Returns, relative_to_group, spread_over_tokens
from spurline.rl.trajectory import Group

if TYPE_CHECKING:
    from spurline.rl.advantages.configs import GrpoConfig


class Grpo:
    """Return relative to the group's mean and spread."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: GrpoConfig):
        self.config = config

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        return [spread_over_tokens(group, relative_to_group(group, "grpo", self._standardized)) for group in groups]

    def _standardized(self, returns: Returns) -> Returns:
        centred = returns - returns.mean()
        return centred / (returns.std(ddof=1) + self.config.eps) if self.config.normalize_std else centred

    def describe(self) -> str:
        spread = ", over its standard deviation" if self.config.normalize_std else ""
        return f"GRPO: each sample's return minus the mean of its prompt's samples{spread}."
