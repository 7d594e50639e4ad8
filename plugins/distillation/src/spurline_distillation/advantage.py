"""Advantage `teacher`: on-policy distillation.

    A_t = weight * (log p_teacher(y_t) - log p_old(y_t)) + reward_weight * A_t(rewards)

at each response token y_t of the policy. The expectation of the first term is minus the reverse KL divergence at this
token, so that the policy gradient lowers the divergence on the policy's own answers (Agarwal et al. 2023,
arXiv:2306.13649; Lu and Thinking Machines Lab 2025, "On-Policy Distillation"). A token gets the term of that token
alone, as with the discount 0. No baseline is subtracted. The second term is optional.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spurline_distillation.configs import TeacherAdvantageConfig
from spurline_rl.advantages import algorithms
from spurline_rl.advantages.configs import DrGrpoConfig, GrpoConfig, RlooConfig
from spurline_rl.protocols.advantage import Advantage
from spurline_rl.scored_groups import ScoredGroups

_OLD = "old_logprobs"
_OF_REWARDS: Mapping[str, Advantage] = {
    "grpo": algorithms.Grpo(GrpoConfig()),
    "dr_grpo": algorithms.DrGrpo(DrGrpoConfig()),
    "rloo": algorithms.Rloo(RlooConfig()),
}


class TeacherAdvantage:
    """The advantage `teacher`."""

    def __init__(self, config: TeacherAdvantageConfig) -> None:
        self.config = config
        self._columns = {column: f"{role}_logprobs" for column, role in config.weighted_teachers.items()}
        self.needs = frozenset({_OLD, *self._columns.values()})
        self._of_rewards = None if config.reward is None else _OF_REWARDS[config.reward]

    def advantages(self, scored: ScoredGroups) -> Mapping[str, NDArray[np.float32]]:
        old = scored.column(_OLD).astype(np.float64)
        found = np.zeros_like(old)
        tokens = [int(group.flat.num_response.sum()) for group in scored.groups]
        for column, logprobs in self._columns.items():
            distance = scored.column(logprobs) - old
            if column is not None:
                distance *= np.repeat([group.columns[column] for group in scored.groups], tokens)
            found += self.config.weight * distance
        if self._of_rewards is not None:
            found += self.config.reward_weight * self._of_rewards.advantages(scored)["advantages"]
        return {"advantages": found.astype(np.float32)}

    def describe(self) -> str:
        teachers = self.config.weighted_teachers.items()
        names = ", ".join(role if column is None else f"{role} ({column})" for column, role in teachers)
        parts = [f"On-policy distillation: the log-probability of each token under {names} minus the policy's"]
        if self._of_rewards is not None:
            parts.append(f"{self.config.reward_weight:g} times {self.config.reward} of the rewards")
        return f"{', plus '.join(parts)}."
