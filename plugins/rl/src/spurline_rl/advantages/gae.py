"""GAE: generalised advantage estimation with a critic (Schulman et al. 2016, arXiv:1506.02438), as PPO uses it.

    delta_t = r_t + gamma * V_{t+1} - V_t
    A_t = delta_t + gamma * lam * A_{t+1}        returns: A_t + V_t

along the response tokens of a trajectory, with its turns joined. V_t is the critic's value before token t, and 0 after
the last token, also if the answer was cut off. The critic is trained on the returns. The advantages are then normalised
over all trained tokens passed in; std divides by the count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spurline_rl.advantages.configs import GaeConfig
from spurline_rl.advantages.shared import discounted_sums, normalized, read_tokens, write_tokens
from spurline_rl.trajectory import Group


class Gae:
    """The discounted sum of the critic's surprises from each token on."""

    needs: frozenset[str] = frozenset({"values"})

    def __init__(self, config: GaeConfig):
        self.config = config

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        gamma = self.config.gamma
        rewards, values = read_tokens(groups, "rewards"), read_tokens(groups, "values")
        surprises = [
            reward + gamma * np.append(value[1:], 0.0)[: len(value)] - value
            for reward, value in zip(rewards, values, strict=True)
        ]
        advantages = discounted_sums(surprises, gamma * self.config.lam)
        returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
        if self.config.normalize:
            advantages = normalized(advantages, read_tokens(groups, "loss_mask"), self.config.eps)
        return write_tokens(groups, advantages=advantages, returns=returns)

    def describe(self) -> str:
        normalized_too = ", normalised over all tokens" if self.config.normalize else ""
        return (
            f"GAE: a critic's temporal differences, discounted by {self.config.gamma:g} and decayed by "
            f"{self.config.lam:g} per token{normalized_too}."
        )
