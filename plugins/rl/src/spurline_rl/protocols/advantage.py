"""Kind `advantage`: compute per-token advantages from the rewards of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from spurline_rl.trajectory import Group


class Advantage(Protocol):
    """Set `advantages` on every turn of scored groups.

    Factory: `Class(config)`. Implementations are pure functions and use only numpy.

    Attributes:
        needs: Fields of a turn that the algorithm reads besides `rewards`, such as `values` of a critic.
    """

    needs: frozenset[str]

    def advantages(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return copies of the groups, in order, with `advantages` float32 per response token.

        Algorithms with a critic also set `returns`, the critic's target. The groups are the whole batch or one
        mini-batch. A statistic over several groups is computed over the groups of one call only.

        Raises:
            DataError: If a group is too small or its rewards cannot be used. The error names the prompt.
        """
        ...

    def describe(self) -> str:
        """Describe the advantage in one sentence, for `spurline plan`."""
        ...


@runtime_checkable
class ComparesSamples(Advantage, Protocol):
    """An advantage that may be one number per attempt, the same for all response tokens of the attempt.

    Sources then write the numbers to the batch without making an array for every turn. If a subclass overrides only
    `advantages`, sources call `advantages`.
    """

    def sample_advantages(self, groups: Sequence[Group]) -> Sequence[NDArray[np.float64]] | None:
        """Return the advantages of each group's attempts, float64 [n] per group.

        `advantages` gives the same numbers, and raises the same errors. If the settings can give different advantages
        to the tokens of one attempt, the result is None.
        """
        ...


class AdvantageConfig(ComponentConfig):
    """Settings of an advantage."""

    goes_with = "loss: ppo"

    kind: ClassVar[str] = "advantage"
    uses_critic: ClassVar[bool] = False
    """If true, the algorithm reads a critic's values, and the run needs the section `critic`."""

    @property
    def smallest_group(self) -> int:
        """Return the smallest number of samples of a prompt that the algorithm can learn from."""
        return 1

    @property
    def divides_by_spread(self) -> bool:
        """Return whether a group's returns are divided by their spread or mean, which enlarges small differences."""
        return False
