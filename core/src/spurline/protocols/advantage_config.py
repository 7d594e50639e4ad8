"""Base of every advantage's config: it says what the algorithm needs of a run. Light: no numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spurline.config.section import ComponentConfig
from spurline.errors import Problem
from spurline.protocols.source_config import PromptSourceConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class AdvantageConfig(ComponentConfig):
    """Settings of an advantage."""

    @property
    def smallest_group(self) -> int:
        """Samples of a prompt below which the algorithm has nothing to learn from."""
        return 1

    @property
    def uses_critic(self) -> bool:
        """Whether the algorithm reads a critic's values, so that the run needs the section `critic`."""
        return False

    @property
    def divides_by_spread(self) -> bool:
        """Whether a group's returns are compared in units of their own spread or mean, so that differences that are
        small in every group weigh as much as large ones."""
        return False

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        source = run.source
        if isinstance(source, PromptSourceConfig) and source.samples_per_prompt < self.smallest_group:
            yield Problem(
                "name",
                f"is {self.name}, which compares the samples of a prompt with each other, but "
                f"source.samples_per_prompt is {source.samples_per_prompt}. Set it to {self.smallest_group} or more "
                "(8 is usual), or choose an advantage that needs no group: reinforce_pp with baseline: batch, or gae.",
            )
        if isinstance(source, PromptSourceConfig) and source.kl_in_reward is not None and self.divides_by_spread:
            yield Problem(
                "name",
                f"is {self.name}, which divides by the spread or the mean of a prompt's returns, but with "
                "source.kl_in_reward even equal answers differ by a little KL, and the division makes full advantages "
                "of it whatever the coefficient. Remove kl_in_reward and set loss.kl.coefficient, or choose an "
                "advantage that does not divide: grpo with normalize_std: false, dr_grpo, rloo or gae.",
            )
        if self.uses_critic and run.critic is None:
            yield Problem(
                "name",
                f"is {self.name}, which reads the values of a critic, and this run has none. Add a section "
                "`critic: {}`, or choose an advantage without a critic, such as grpo.",
            )
