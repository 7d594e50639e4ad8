"""Settings of the orders `mixture` and `success_mixture`. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import Section
from spurline.errors import Problem
from spurline.protocols.order import OrderConfig
from spurline_rl.training_configs import SuccessOrderConfig

Shares = dict[str, Annotated[float, Field(ge=0, le=1)]]


class PartsConfig(OrderConfig):
    """Base settings of orders that draw from parts of the samples: domains, levels, or environments."""

    column: str = Field(min_length=1)
    """Column whose value is the part of a row, such as its domain. Dots lead into objects, as in `meta.domain`."""
    shares: Shares = {}
    """Share of each part in the samples of an epoch, such as `{math: 0.7}`. Parts without a share divide the rest by
    their numbers of samples and the weights of their datasets. The share 0 leaves a part out."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if sum(self.shares.values()) > 1 + 1e-9:
            yield Problem("shares", f"has the sum {sum(self.shares.values()):g}. The sum must be at most 1.")
        if any(dataset.share is not None for dataset in run.data.train):
            yield Problem(
                "name",
                f"is {self.name}, which draws every row of a part equally often, so a `share` in data.train would not "
                "hold. Remove it, or give each file a value of its own in the column.",
            )


class MixtureConfig(PartsConfig):
    """Mix the parts of the data by shares of samples, and shuffle each epoch. An epoch rounds them to samples."""

    name: str = "mixture"


class ReplayConfig(Section):
    """Draw prompts again that were not solved."""

    share: float = Field(default=0.25, gt=0, lt=1)
    """Largest share of a step's prompts that are drawn again."""
    solved_at: float = Field(default=1.0, gt=0, le=1)
    """Success from which a prompt counts as solved. A prompt below it waits to be drawn again."""
    most_times: int = Field(default=3, ge=1)
    """How often a prompt is drawn again until it is given up. After it is solved, it is counted from zero."""
    most_prompts: int = Field(default=1024, ge=1)
    """Largest number of prompts that wait. If there are more, the one that has waited longest is given up."""


class SuccessMixtureConfig(SuccessOrderConfig, PartsConfig):
    """Draw more prompts of the parts whose prompts are sometimes solved, and draw unsolved prompts again.

    The weight of a part is its share times `floor` + (1 - `floor`) times the mean of 4 p (1 - p) over its last prompts,
    where p is the success of a prompt (sampling for learnability, Foster et al. 2025, arXiv:2502.12272). Within a part,
    every prompt comes once in each pass. A step never draws a prompt twice.
    """

    name: str = "success_mixture"
    memory: int = Field(default=128, ge=1)
    """Number of prompts of a part over which success is averaged. The average forgets older prompts exponentially."""
    replay: ReplayConfig | None = None
    """Draw prompts again that were not solved; null never does."""
