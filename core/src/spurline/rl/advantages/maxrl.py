"""MaxRL: maximum likelihood reinforcement learning (Tajwar et al. 2026, arXiv:2602.02710).

    A_i = (R_i - mean(R)) / (mean(R) + eps)

over the samples of a prompt, the same for every token of sample i. For rewards of 0 and 1 the mean estimates the
probability p of success, and the gradient of log p is that of p over p: prompts that are rarely solved weigh more. It
asks for rewards >= 0; a group without success has returns that are all equal, and gets exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from spurline.errors import DataError
from spurline.rl.advantages.configs import MaxRlConfig
from spurline.rl.advantages.shared import Returns, center, relative_to_group, spread_over_tokens
from spurline.rl.trajectory import Group


class MaxRl:
    """The return relative to the group's mean, in units of that mean."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: MaxRlConfig):
        self.config = config

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        return [self._compare(group) for group in groups]

    def _compare(self, group: Group) -> Group:
        def divide_by_mean(returns: Returns) -> Returns:
            if returns.min() < 0:
                raise DataError(
                    f"A sample of prompt '{group.uid}' has return {returns.min():g}, but maxrl takes the mean return "
                    "for a probability of success. Use rewards between 0 and 1, or choose advantage: grpo."
                )
            return center(returns) / (returns.mean() + self.config.eps)

        return spread_over_tokens(group, relative_to_group(group, "maxrl", divide_by_mean))

    def describe(self) -> str:
        return "MaxRL: each sample's return minus the mean of its prompt's samples, over that mean."
