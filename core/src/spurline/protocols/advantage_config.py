"""Base of every advantage's config: it says how many samples of a prompt the algorithm needs. Light: no numpy."""

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

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        source = run.source
        if isinstance(source, PromptSourceConfig) and source.samples_per_prompt < self.smallest_group:
            yield Problem(
                "name",
                f"is {self.name}, which compares the samples of a prompt with each other, but "
                f"source.samples_per_prompt is {source.samples_per_prompt}. Set it to {self.smallest_group} or more "
                "(8 is usual), or choose an advantage that needs no group: reinforce_pp with baseline: batch, or gae.",
            )
        if self.uses_critic and run.critic is None:
            yield Problem(
                "name",
                f"is {self.name}, which reads the values of a critic, and this run has none. Add a section "
                "`critic: {}`, or choose an advantage without a critic, such as grpo.",
            )
