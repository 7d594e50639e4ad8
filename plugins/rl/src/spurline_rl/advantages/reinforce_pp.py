"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): normalise over all samples together, not prompt by prompt.

`baseline: group`, the paper's variant for several samples per prompt:

    B_i = R_i - mean(R of the prompt),  A_i = B_i / (std(B) + eps)

with std over all samples passed in; their mean is 0 already. Samples count the same whatever their length: if they were
weighed by tokens, groups with equal returns would get an advantage.

`baseline: batch`, for any number of samples per prompt:

    G_t = r_t + gamma * G_{t+1},  A_t = (G_t - mean(G)) / (std(G) + eps)

along the tokens of a trajectory, with mean and std over all trained tokens passed in. Both std divide by the count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spurline_rl.advantages.configs import ReinforcePlusPlusConfig
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
from spurline_rl.trajectory import Group


class ReinforcePlusPlus:
    """The return relative to a baseline, in units of the spread over all samples."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: ReinforcePlusPlusConfig):
        self.config = config

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        samples = self.sample_advantages(groups)
        return self._compare_tokens(groups) if samples is None else spread_over_groups(groups, samples)

    def sample_advantages(self, groups: Sequence[Group]) -> list[Returns] | None:
        if self.config.baseline == "batch":
            return None
        centred = [relative_to_group(group, "reinforce_pp", center) for group in groups]
        std = np.concatenate([np.zeros(0), *centred]).std() if centred else 0.0
        return [values / (std + self.config.eps) for values in centred]

    def _compare_tokens(self, groups: Sequence[Group]) -> list[Group]:
        returns = discounted_sums(read_tokens(groups, "rewards"), self.config.gamma)
        return write_tokens(groups, advantages=normalized(returns, read_tokens(groups, "loss_mask"), self.config.eps))

    def describe(self) -> str:
        if self.config.baseline == "group":
            return "REINFORCE++: return minus the mean of the prompt's samples, over the spread of all samples."
        return f"REINFORCE++: returns of each token, discounted by {self.config.gamma:g}, normalised over all tokens."
