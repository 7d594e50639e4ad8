"""Define an advantage and a loss that read a number in the prompt's row. `source.carry` names the column.

row_weight      A_i = w (R_i - mean(R)) / std(R)     w: the number of the prompt's row
row_gradient    l = -w A log p
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spurline.errors import DataError
from spurline.protocols.loss import TokenLossInputs
from spurline_rl.advantages.shared import Returns, relative_to_group
from spurline_rl.losses.policy_loss import PolicyLoss
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.trajectory import Group
from spurline_sources_and_columns.config import RowGradientConfig, RowWeightConfig


class RowWeight:
    """Multiplies the advantages of GRPO by the group's column."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: RowWeightConfig) -> None:
        self._column = config.column

    def advantages(self, scored: ScoredGroups) -> Mapping[str, NDArray[np.float32]]:
        found = relative_to_group(scored, "row_weight", _standardized)
        weights = [self._weight(group) for group in scored.groups]
        return scored.spread([weight * values for weight, values in zip(weights, found, strict=True)])

    def _weight(self, group: Group) -> float:
        if self._column not in group.columns:
            raise DataError(
                f"The group of prompt '{group.uid}' has no column '{self._column}'. Set source.carry: [{self._column}]."
            )
        return group.columns[self._column]

    def describe(self) -> str:
        return f"GRPO, multiplied by the column '{self._column}' of the prompt's row."


def _standardized(returns: Returns) -> Returns:
    return (returns - returns.mean()) / returns.std(ddof=1)


class RowGradient(PolicyLoss):
    """The loss -w A log p."""

    def __init__(self, config: RowGradientConfig) -> None:
        self._column = config.column
        super().__init__(config)

    def surrogate_needs(self) -> frozenset[str]:
        return frozenset({"advantages", self._column})

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        return -inputs.columns[self._column] * inputs.columns["advantages"] * inputs.logprobs

    def describe_surrogate(self) -> str:
        return f"Policy gradient: minus the row's '{self._column}' times advantage times log-probability"
