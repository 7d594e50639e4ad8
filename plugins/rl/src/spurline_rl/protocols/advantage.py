"""Kind `advantage`: rewards of a group become per-token advantages."""

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

    Factory: `Class(config)`. Pure; numpy only.

    Attributes:
        needs: Fields of a turn that must be set besides `rewards`: `values` for algorithms with a critic, else
            `frozenset()`.
    """

    needs: frozenset[str]

    def advantages(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The same groups, in the same order, with `advantages` float32 per response token.

        Algorithms with a critic also set `returns`, what the critic is trained on. The groups given are not changed.
        Statistics that span groups are those of the groups passed: the caller decides whether these are the whole batch
        or one mini-batch.

        Raises:
            DataError: Names the prompt when a group is too small or its rewards cannot be used.
        """
        ...

    def describe(self) -> str:
        """The advantage in words, one sentence, for `spurline plan`."""
        ...


@runtime_checkable
class ComparesSamples(Advantage, Protocol):
    """An advantage that may be one number per attempt, the same for all its response tokens.

    Sources then write it to the batch as it is, without an array for every turn. A subclass that
    overrides `advantages` alone is asked for those.
    """

    def sample_advantages(self, groups: Sequence[Group]) -> Sequence[NDArray[np.float64]] | None:
        """The advantages of each group's attempts, float64 [n] per group; `advantages` writes the same numbers to the
        turns. None where, with these settings, tokens of an attempt differ. Raises what `advantages` raises."""
        ...


class AdvantageConfig(ComponentConfig):
    """Settings of an advantage."""

    goes_with = "loss: ppo"

    kind: ClassVar[str] = "advantage"
    uses_critic: ClassVar[bool] = False
    """If true, the algorithm reads a critic's values, so that the run needs the section `critic`."""

    @property
    def smallest_group(self) -> int:
        """Samples of a prompt below which the algorithm has nothing to learn from."""
        return 1

    @property
    def divides_by_spread(self) -> bool:
        """Return whether a group's returns are compared in units of their own spread or mean, so that differences
        that are small in every group weigh as much as large ones."""
        return False
