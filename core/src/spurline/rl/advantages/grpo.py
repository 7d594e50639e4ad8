"""GRPO: group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), and Dr. GRPO.

    GRPO        A_i = (R_i - mean(R)) / (std(R) + eps)
    Dr. GRPO    A_i = R_i - mean(R)

over the n samples of a prompt, the same for every token of sample i; exactly 0 in groups whose returns are all equal.
std is the sample standard deviation (n - 1 in the denominator), as the trainers in use compute it; the paper leaves it
open. Without the division (Dr. GRPO: GRPO done right, Liu et al. 2025, arXiv:2503.20783) prompts that nearly all or
nearly no samples solve no longer weigh more than others. That paper's other half, a divisor that does not depend on
the answer's length, is `reduction: fixed_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence

from spurline.rl.advantages.configs import DrGrpoConfig, GrpoConfig
from spurline.rl.advantages.shared import Returns, center, relative_to_group, spread_over_tokens
from spurline.rl.trajectory import Group


class Grpo:
    """The return relative to the group's mean and spread."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: GrpoConfig):
        self.config = config

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        return [spread_over_tokens(group, relative_to_group(group, "grpo", self._standardize)) for group in groups]

    def _standardize(self, returns: Returns) -> Returns:
        spread = returns.std(ddof=1) + self.config.eps if self.config.normalize_std else 1.0
        return center(returns) / spread

    def describe(self) -> str:
        spread = ", over its standard deviation" if self.config.normalize_std else ""
        return f"GRPO: each sample's return minus the mean of its prompt's samples{spread}."


class DrGrpo:
    """The return relative to the group's mean."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: DrGrpoConfig):
        self.config = config

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        return [spread_over_tokens(group, relative_to_group(group, "dr_grpo", center)) for group in groups]

    def describe(self) -> str:
        return "Dr. GRPO: each sample's return minus the mean of its prompt's samples."
