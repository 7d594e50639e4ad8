"""The advantage algorithms. Four of them compare the samples of a prompt, and give all tokens of a sample one value:

    GRPO        A_i = (R_i - mean(R)) / (std(R) + eps)      Shao et al. 2024, arXiv:2402.03300
    Dr. GRPO    A_i = R_i - mean(R)                         Liu et al. 2025, arXiv:2503.20783
    RLOO        A_i = n / (n - 1) * (R_i - mean(R))         Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019
    MaxRL       A_i = (R_i - mean(R)) / (mean(R) + eps)     Tajwar et al. 2026, arXiv:2602.02710

R are the returns of the n samples of a prompt. If they are all equal, the advantages are exactly 0.

GRPO: std divides by n - 1, as in other trainers. The paper does not define std.
Dr. GRPO (GRPO done right): there is no division by std, which would give more weight to prompts that nearly all or
nearly no samples solve. The paper also divides by a constant instead of the answer's length: `reduction: fixed_norm`.
RLOO (REINFORCE leave-one-out): the formula equals R_i minus the mean of the other returns. This baseline does not
contain the sample's own return, so the policy gradient stays unbiased.
MaxRL (maximum likelihood reinforcement learning): for rewards of 0 and 1, mean(R) estimates the probability p of
success. The gradient of log p is the gradient of p divided by p, so rarely solved prompts weigh more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar

import numpy as np

from spurline.errors import DataError
from spurline_rl.advantages import configs
from spurline_rl.advantages.shared import (
    Returns,
    center,
    discounted_sums,
    normalized,
    read_tokens,
    relative_to_group,
    spread_over_groups,
    write_tokens,
)
from spurline_rl.protocols.advantage import AdvantageConfig
from spurline_rl.trajectory import Group

Config = TypeVar("Config", bound=AdvantageConfig)


class _Configured(Generic[Config]):
    needs: frozenset[str] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config


class _GroupRelative(_Configured[Config], ABC):
    formula: ClassVar[str]

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        return spread_over_groups(groups, self.sample_advantages(groups))

    def sample_advantages(self, groups: Sequence[Group]) -> list[Returns]:
        return [relative_to_group(group, self.config.name, partial(self._compare, uid=group.uid)) for group in groups]

    @abstractmethod
    def _compare(self, returns: Returns, uid: str) -> Returns:
        """Return the advantages for these returns, which are not all equal. `uid` names the prompt in errors."""

    def describe(self) -> str:
        return self.formula


class Grpo(_GroupRelative[configs.GrpoConfig]):
    """The return relative to the group's mean and spread."""

    formula = "GRPO: each sample's return minus the mean of its prompt's samples"

    def _compare(self, returns: Returns, uid: str) -> Returns:
        spread = returns.std(ddof=1) + self.config.eps if self.config.normalize_std else 1.0
        return center(returns) / spread

    def describe(self) -> str:
        return f"{self.formula}{', divided by their standard deviation' if self.config.normalize_std else ''}."


class DrGrpo(_GroupRelative[configs.DrGrpoConfig]):
    """The return relative to the group's mean."""

    formula = "Dr. GRPO: each sample's return minus the mean of its prompt's samples."

    def _compare(self, returns: Returns, uid: str) -> Returns:
        return center(returns)


class Rloo(_GroupRelative[configs.RlooConfig]):
    """The return relative to the mean of the group's other samples."""

    formula = "RLOO: each sample's return minus the mean of its prompt's other samples."

    def _compare(self, returns: Returns, uid: str) -> Returns:
        return len(returns) / (len(returns) - 1) * center(returns)


class MaxRl(_GroupRelative[configs.MaxRlConfig]):
    """The return relative to the group's mean, divided by the mean."""

    formula = "MaxRL: each sample's return minus the mean of its prompt's samples, divided by that mean."

    def _compare(self, returns: Returns, uid: str) -> Returns:
        if returns.min() < 0:
            raise DataError(
                f"A sample of prompt '{uid}' has return {returns.min():g}, but for maxrl the mean return is a "
                "probability of success. Use rewards between 0 and 1, or choose advantage: grpo."
            )
        return center(returns) / (returns.mean() + self.config.eps)


class ReinforcePlusPlus(_Configured[configs.ReinforcePlusPlusConfig]):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): normalise over all samples together, not prompt by prompt.

    `baseline: group`, the paper's variant for several samples per prompt:

        B_i = R_i - mean(R of the prompt),  A_i = B_i / (std(B) + eps)

    std is computed over all samples passed in. Every sample counts once, so the mean of B is 0. If longer samples
    counted more, the mean would not be 0, and subtracting it would give groups with equal returns an advantage.

    `baseline: batch`, for any number of samples per prompt:

        G_t = r_t + gamma * G_{t+1},  A_t = (G_t - mean(G)) / (std(G) + eps)

    along the tokens of a trajectory. mean and std are computed over all trained tokens passed in. In both variants, std
    divides by the count, not by the count minus 1.
    """

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        samples = self.sample_advantages(groups)
        if samples is not None:
            return spread_over_groups(groups, samples)
        returns = discounted_sums(read_tokens(groups, "rewards"), self.config.gamma)
        return write_tokens(groups, advantages=normalized(returns, read_tokens(groups, "loss_mask"), self.config.eps))

    def sample_advantages(self, groups: Sequence[Group]) -> list[Returns] | None:
        if self.config.baseline == "batch":
            return None
        centred = [relative_to_group(group, "reinforce_pp", center) for group in groups]
        std = np.concatenate([np.zeros(0), *centred]).std() if centred else 0.0
        return [values / (std + self.config.eps) for values in centred]

    def describe(self) -> str:
        if self.config.baseline == "group":
            return "REINFORCE++: return minus the mean of the prompt's samples, divided by the spread of all samples."
        return f"REINFORCE++: returns of each token, discounted by {self.config.gamma:g}, normalised over all tokens."


class Gae(_Configured[configs.GaeConfig]):
    """Generalised advantage estimation with a critic (GAE, Schulman et al. 2016, arXiv:1506.02438), as PPO uses it.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t = delta_t + gamma * lam * A_{t+1}        returns: A_t + V_t

    along the response tokens of a trajectory, with its turns joined. V_t is the critic's value before token t. It is 0
    after the last token, even if the answer was cut off. The critic is trained on the returns. The advantages are then
    normalised over all trained tokens passed in, with a std that divides by the count, not by the count minus 1.
    """

    needs = frozenset({"values"})

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
