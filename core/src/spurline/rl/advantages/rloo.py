"""RLOO: REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019).

    A_i = R_i - mean(R_j for j != i) = n / (n - 1) * (R_i - mean(R))

over the n samples of a prompt, the same for every token of sample i. The baseline of a sample does not contain its own
return, which keeps the policy gradient unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence

from spurline.rl.advantages.configs import RlooConfig
from spurline.rl.advantages.shared import Returns, center, relative_to_group, spread_over_tokens
from spurline.rl.trajectory import Group


class Rloo:
    """The return relative to the mean of the others."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: RlooConfig):
        self.config = config

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        return [spread_over_tokens(group, relative_to_group(group, "rloo", _leave_one_out)) for group in groups]

    def describe(self) -> str:
        return "RLOO: each sample's return minus the mean of its prompt's other samples."


def _leave_one_out(returns: Returns) -> Returns:
    return len(returns) / (len(returns) - 1) * center(returns)
