"""Kind `advantage`: compute per-token advantages from the rewards of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from spurline_rl.scored_groups import ScoredGroups


class Advantage(Protocol):
    """Compute an advantage for each response token of scored groups.

    Factory: `Class(config)`, or `Class(config, registry=Registry)` if the config says `has_parts`. Implementations are
    pure functions and use only numpy.

    Attributes:
        needs: Columns that the algorithm reads besides `rewards`: `values` of a critic, `old_logprobs` of the policy
            before the update, `ROLE_logprobs` of another model, such as `teacher_logprobs`, or columns of a scorer.
    """

    needs: frozenset[str]

    def advantages(self, scored: ScoredGroups) -> Mapping[str, NDArray[np.float32]]:
        """Return the column `advantages`: float32 [A], for the response tokens in the order of `scored.column`.

        Algorithms with a critic also return `returns` [A], the critic's target. The groups are the whole batch or one
        mini-batch. A statistic over several groups is computed over the groups of one call only.

        Raises:
            DataError: If a group is too small or its rewards cannot be used. The error names the prompt.
        """
        ...

    def describe(self) -> str:
        """Describe the advantage in one sentence, for `spurline plan`."""
        ...


class AdvantageConfig(ComponentConfig):
    """Settings of an advantage."""

    goes_with = "loss: ppo"

    kind: ClassVar[str] = "advantage"
    has_parts: ClassVar[bool] = False
    """If true, the algorithm is made of others, which its factory makes with the registry."""
    uses_critic: ClassVar[bool] = False
    """If true, the algorithm reads a critic's values, and the run needs the section `critic`."""
    learns_from_rewards: ClassVar[bool] = True
    """If false, the advantages come from elsewhere, such as a teacher. Groups whose rewards are all equal then teach as
    much as others."""
    compares_returns: ClassVar[bool] = True
    """If false, the algorithm compares parts of returns, such as terms or turns. Groups whose returns are all equal
    then teach too."""

    def part(self, label: str) -> tuple[str, AdvantageConfig]:
        """Return the name of the setting with the advantage of the environment `label`, and this advantage."""
        return "advantage", self

    @property
    def reads_rewards(self) -> bool:
        """Return whether the advantages depend on rewards at all. They may come from elsewhere for the most part."""
        return self.learns_from_rewards

    @property
    def roles(self) -> frozenset[str]:
        """Return the roles of the untrained models whose logprobs the algorithm reads. They take memory."""
        return frozenset()

    @property
    def smallest_group(self) -> int:
        """Return the smallest number of samples of a prompt that the algorithm can learn from."""
        return 1

    @property
    def weighs_terms(self) -> bool:
        """Return whether the algorithm has weights of reward terms, in a setting `weights`, and ignores those of the
        source."""
        return False

    @property
    def divides_by_spread(self) -> bool:
        """Return whether a group's returns are divided by their spread or mean, which enlarges small differences."""
        return False
