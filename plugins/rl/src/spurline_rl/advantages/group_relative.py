"""Advantages that compare the samples of a prompt: one number per sample, the same for each of its tokens.

    GRPO        A_i = (R_i - mean(R)) / (std(R) + eps)      Shao et al. 2024, arXiv:2402.03300
    Dr. GRPO    A_i = R_i - mean(R)                         Liu et al. 2025, arXiv:2503.20783
    RLOO        A_i = n / (n - 1) * (R_i - mean(R))         Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019
    MaxRL       A_i = (R_i - mean(R)) / (mean(R) + eps)     Tajwar et al. 2026, arXiv:2602.02710

over the returns R of the n samples of a prompt; exactly 0 in groups whose returns are all equal.

GRPO: std has n - 1 in the denominator, as in other trainers; the paper leaves it open. Dr. GRPO (GRPO done right):
without the division, prompts that nearly all or nearly no samples solve do not weigh more than others. The paper's
divisor, which does not depend on the answer's length, is `reduction: fixed_norm`. RLOO (REINFORCE leave-one-out): this
is R_i less the mean of the other returns; a baseline without the sample's own return keeps the policy gradient
unbiased. MaxRL (maximum likelihood reinforcement learning): for rewards of 0 and 1 the mean estimates the probability p
of success. As the gradient of log p is the gradient of p over p, rarely solved prompts weigh more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar

from spurline.errors import DataError
from spurline_rl.advantages.configs import DrGrpoConfig, GroupAdvantageConfig, GrpoConfig, MaxRlConfig, RlooConfig
from spurline_rl.advantages.shared import Returns, center, relative_to_group, spread_over_groups
from spurline_rl.trajectory import Group

Config = TypeVar("Config", bound=GroupAdvantageConfig)


class _GroupRelative(ABC, Generic[Config]):
    needs: frozenset[str] = frozenset()
    name: ClassVar[str]
    formula: ClassVar[str]

    def __init__(self, config: Config) -> None:
        self.config = config

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        return spread_over_groups(groups, self.sample_advantages(groups))

    def sample_advantages(self, groups: Sequence[Group]) -> list[Returns]:
        return [relative_to_group(group, self.name, partial(self._compare, uid=group.uid)) for group in groups]

    @abstractmethod
    def _compare(self, returns: Returns, uid: str) -> Returns:
        """Return the advantages of samples with these returns, which differ, of the prompt `uid`."""

    def describe(self) -> str:
        return self.formula


class Grpo(_GroupRelative[GrpoConfig]):
    """The return relative to the group's mean and spread."""

    name = "grpo"
    formula = "GRPO: each sample's return minus the mean of its prompt's samples"

    def _compare(self, returns: Returns, uid: str) -> Returns:
        spread = returns.std(ddof=1) + self.config.eps if self.config.normalize_std else 1.0
        return center(returns) / spread

    def describe(self) -> str:
        return f"{self.formula}{', over its standard deviation' if self.config.normalize_std else ''}."


class DrGrpo(_GroupRelative[DrGrpoConfig]):
    """The return relative to the group's mean."""

    name = "dr_grpo"
    formula = "Dr. GRPO: each sample's return minus the mean of its prompt's samples."

    def _compare(self, returns: Returns, uid: str) -> Returns:
        return center(returns)


class Rloo(_GroupRelative[RlooConfig]):
    """The return relative to the mean of the others."""

    name = "rloo"
    formula = "RLOO: each sample's return minus the mean of its prompt's other samples."

    def _compare(self, returns: Returns, uid: str) -> Returns:
        return len(returns) / (len(returns) - 1) * center(returns)


class MaxRl(_GroupRelative[MaxRlConfig]):
    """The return relative to the group's mean, in units of that mean."""

    name = "maxrl"
    formula = "MaxRL: each sample's return minus the mean of its prompt's samples, over that mean."

    def _compare(self, returns: Returns, uid: str) -> Returns:
        if returns.min() < 0:
            raise DataError(
                f"A sample of prompt '{uid}' has return {returns.min():g}, but maxrl takes the mean return for a "
                "probability of success. Use rewards between 0 and 1, or choose advantage: grpo."
            )
        return center(returns) / (returns.mean() + self.config.eps)
