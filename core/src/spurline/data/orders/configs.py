"""Settings of core's orders. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.errors import Problem, listing, suggestion
from spurline.protocols.order import OrderConfig


class UniformOrderConfig(OrderConfig):
    """Each epoch in a random order of its own."""

    name: str = "uniform"


class SequentialOrderConfig(OrderConfig):
    """As in the files, dataset after dataset, the same in each epoch."""

    name: str = "sequential"


class LengthGroupedOrderConfig(OrderConfig):
    """Samples of similar length share a batch, and batches come in random order.

    Only the batch in which two epochs meet is mixed, as it belongs to both.
    """

    reads_lengths = True

    name: str = "length_grouped"
    pool_batches: int = Field(default=50, gt=0)
    """Batches whose samples are drawn at random and then sorted by length together. More make lengths within a batch
    more alike, fewer make batches more random."""


class CurriculumOrderConfig(OrderConfig):
    """By the numbers of a column, from the easiest sample to the hardest, anew in each epoch; ties are shuffled."""

    name: str = "curriculum"
    column: str = Field(min_length=1)
    """Column of the rows that holds the difficulty, under its name in the file. Dots lead into objects:
    `meta.difficulty`."""
    direction: Literal["ascending", "descending"] = "ascending"
    """Whether small numbers come first, or large ones."""
    stages: int | None = Field(default=None, gt=0)
    """Cut each epoch into this many stages of equal size, each harder than the one before and shuffled within; null
    sorts the whole epoch."""


class RewardAdaptiveOrderConfig(OrderConfig):
    """Prompts that some attempts solve and others do not come more often.

    A prompt of mean reward p is drawn with a weight that grows with p (1 - p), the variance of its success (sampling
    for learnability, Foster et al. 2025, arXiv:2502.12272). Prompts that were not tried yet count as most worth it. A
    step's worth of prompts is drawn at a time, all different. `epochs` counts draws, as many as the mixture has
    prompts.
    """

    adaptive = True

    name: str = "reward_adaptive"
    reward: str | None = None
    """Reward term that says whether an attempt succeeded; null takes the weighted sum of all."""
    failed: float = Field(default=0.0, allow_inf_nan=False)
    """Mean reward of a prompt at which, and below which, nothing succeeded."""
    solved: float = Field(default=1.0, allow_inf_nan=False)
    """Mean reward of a prompt at which, and above which, everything succeeded."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Weight of a prompt that always succeeds or never does; one that succeeds half of the time has 1."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if self.solved <= self.failed:
            yield Problem(
                "solved",
                f"is {self.solved:g}, which is not above failed: {self.failed:g}. Set it to the mean reward of a "
                "prompt whose attempts all succeed.",
            )
        terms = run.source.reward_terms
        if self.reward is not None and terms is not None and self.reward not in terms:
            yield Problem("reward", unknown_reward(self.reward, terms))


def unknown_reward(reward: str, terms: Collection[str]) -> str:
    """Why an order cannot go by this reward. terms: those that attempts have."""
    return (
        f"is '{reward}', but the environment gives no reward of that name.{suggestion(reward, terms)} "
        f"Rewards: {listing(terms)}."
    )
