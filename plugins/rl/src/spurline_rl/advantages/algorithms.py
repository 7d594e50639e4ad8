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
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError
from spurline_rl.advantages import configs
from spurline_rl.advantages.shared import Returns, center, discounted_sums, normalized, relative_to_group
from spurline_rl.protocols.advantage import AdvantageConfig
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.trajectory import are_equal

Column = NDArray[np.float32]
Config = TypeVar("Config", bound=AdvantageConfig)


class _Configured(Generic[Config]):
    needs: frozenset[str] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config


class _GroupRelative(_Configured[Config], ABC):
    formula: ClassVar[str]

    def advantages(self, scored: ScoredGroups) -> Mapping[str, Column]:
        return scored.spread(relative_to_group(scored, self.config.name, self._compare))

    @abstractmethod
    def _compare(self, returns: Returns) -> Returns:
        """Return the advantages for the returns of a group, which are not all equal."""

    def describe(self) -> str:
        return self.formula


class Grpo(_GroupRelative[configs.GrpoConfig]):
    """The return relative to the group's mean and spread."""

    formula = "GRPO: each sample's return minus the mean of its prompt's samples"

    def _compare(self, returns: Returns) -> Returns:
        spread = returns.std(ddof=1) + self.config.eps if self.config.normalize_std else 1.0
        return center(returns) / spread

    def describe(self) -> str:
        return f"{self.formula}{', divided by their standard deviation' if self.config.normalize_std else ''}."


class DrGrpo(_GroupRelative[configs.DrGrpoConfig]):
    """The return relative to the group's mean."""

    formula = "Dr. GRPO: each sample's return minus the mean of its prompt's samples."

    def _compare(self, returns: Returns) -> Returns:
        return center(returns)


class Rloo(_GroupRelative[configs.RlooConfig]):
    """The return relative to the mean of the group's other samples."""

    formula = "RLOO: each sample's return minus the mean of its prompt's other samples."

    def _compare(self, returns: Returns) -> Returns:
        return len(returns) / (len(returns) - 1) * center(returns)


class MaxRl(_GroupRelative[configs.MaxRlConfig]):
    """The return relative to the group's mean, divided by the mean."""

    formula = "MaxRL: each sample's return minus the mean of its prompt's samples, divided by that mean."

    def advantages(self, scored: ScoredGroups) -> Mapping[str, Column]:
        for group, returns in zip(scored.groups, scored.returns, strict=True):
            if returns.min(initial=0.0) < 0 and not are_equal(returns):
                raise DataError(
                    f"A sample of prompt '{group.uid}' has return {returns.min():g}, but for maxrl the mean return is "
                    "a probability of success. Use rewards between 0 and 1, or choose advantage: grpo."
                )
        return super().advantages(scored)

    def _compare(self, returns: Returns) -> Returns:
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

    def advantages(self, scored: ScoredGroups) -> Mapping[str, Column]:
        eps = self.config.eps
        if self.config.baseline == "group":
            centred = relative_to_group(scored, "reinforce_pp", center)
            std = np.concatenate([np.zeros(0), *centred]).std() if centred else 0.0
            return scored.spread([values / (std + eps) for values in centred])
        rewards = scored.column("rewards").astype(np.float64)
        returns = discounted_sums(rewards, scored.attempt_tokens, self.config.gamma)
        return {"advantages": normalized(returns, scored.column("loss_mask"), eps).astype(np.float32)}

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

    def advantages(self, scored: ScoredGroups) -> Mapping[str, Column]:
        gamma = self.config.gamma
        rewards, values = (scored.column(name).astype(np.float64) for name in ("rewards", "values"))
        following = np.append(values[1:], 0.0)[: len(values)]
        if len(values):
            # An attempt without tokens marks the end of the attempt before it, or the last of all ends.
            following[np.cumsum(scored.attempt_tokens) - 1] = 0.0
        surprises = rewards + gamma * following - values
        advantages = discounted_sums(surprises, scored.attempt_tokens, gamma * self.config.lam)
        returns = advantages + values
        if self.config.normalize:
            advantages = normalized(advantages, scored.column("loss_mask"), self.config.eps)
        return {"advantages": advantages.astype(np.float32), "returns": returns.astype(np.float32)}

    def describe(self) -> str:
        normalized_too = ", normalised over all tokens" if self.config.normalize else ""
        return (
            f"GAE: a critic's temporal differences, discounted by {self.config.gamma:g} and decayed by "
            f"{self.config.lam:g} per token{normalized_too}."
        )
