"""Settings of the ways to cut a batch into optimizer steps. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.protocols.minibatches import MiniBatchesConfig


class WholeBatchConfig(MiniBatchesConfig):
    """One optimizer step per batch."""

    name: str = "whole"

    def minibatch_prompts(self, prompts_per_step: int) -> int:
        return prompts_per_step


class ByPromptConfig(MiniBatchesConfig):
    """Cut a batch of rollouts into optimizer steps of whole prompts."""

    name: str = "by_prompt"
    prompts_per_minibatch: Annotated[int | None, OnResume.BY_NAME] = Field(default=None, gt=0)
    """Prompts in one optimizer step; null takes all of the step's."""
    update_epochs: Annotated[int, OnResume.BY_NAME] = Field(default=1, gt=0)
    """Passes over the batch."""

    def minibatch_prompts(self, prompts_per_step: int) -> int:
        return self.prompts_per_minibatch or prompts_per_step

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        num_prompts = run.source.num_prompts
        if num_prompts is None:
            yield Problem(
                "name",
                f"is by_prompt, but the source '{run.source.name}' draws no prompts. Choose a source of rollouts, or "
                "minibatches: whole.",
            )
        elif self.prompts_per_minibatch is not None and num_prompts % self.prompts_per_minibatch:
            yield Problem(
                "prompts_per_minibatch",
                f"is {self.prompts_per_minibatch}, which does not divide source.prompts_per_step: "
                f"{num_prompts}. Choose a divisor.",
            )
