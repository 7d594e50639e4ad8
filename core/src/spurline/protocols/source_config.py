"""What the config of every source that trains on rollouts says. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from spurline.config.section import ComponentConfig


class PromptSourceConfig(ComponentConfig):
    """Base of the configs of sources that train on rollouts."""

    run_defaults: ClassVar[Mapping[str, str]] = {"collator": "rollouts", "minibatches": "by_prompt", "loss": "ppo"}

    prompts_per_step: int = Field(default=32, gt=0)
    """Prompts whose rollouts make up the batch of one step."""
    samples_per_prompt: int = Field(default=8, gt=0)
    """Rollouts of each prompt: its group."""
