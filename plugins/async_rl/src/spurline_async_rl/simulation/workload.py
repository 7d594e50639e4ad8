"""What a run is made of: how long groups, steps and publishes take, and what becomes of groups.

Place on the way: options of `spurline simulate`, or what an earlier run measured -> Workload -> one Setup of the model
for each choice of knobs. Knows what the numbers rest on, so that a prediction can say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from spurline_async_rl.scheduling.scheduler import SchedulerLimits
from spurline_async_rl.simulation.distributions import Distribution
from spurline_async_rl.simulation.engines import WORK_IN_SECONDS, Speed
from spurline_async_rl.simulation.setup import Fate, Outcome, Setup

_LARGEST = 4096
"""Groups on one engine up to which a saturated one gets slower; more are taken to be as slow as these."""


@dataclass(frozen=True)
class Outcomes:
    """Share of the groups, by draw, that make way for another one; the others are kept."""

    filtered: float = 0.0
    quarantined: float = 0.0

    def of(self, number: float) -> Outcome:
        """number: uniform in 0..1."""
        if number < self.filtered:
            return "filtered"
        return "quarantined" if number < self.filtered + self.quarantined else "kept"


@dataclass(frozen=True)
class Workload:
    """Times in seconds.

    group_s: of a group, on an engine that is not saturated. speed: how fast groups get on, by how many are on their
    engine. train_s: from one batch to the next without waiting or publishing, for batches of `batch_size` groups.
    transfer_s, pause_s: of a publish, with engines going on and standing still. basis: where the numbers come from.
    """

    group_s: Distribution
    train_s: Distribution
    batch_size: int
    speed: Speed = WORK_IN_SECONDS
    outcomes: Outcomes = field(default_factory=Outcomes)
    transfer_s: float = 0.0
    pause_s: float = 0.0
    basis: Sequence[str] = field(default_factory=list[str])

    def setup(self, limits: SchedulerLimits, engines: int, publish_every: int) -> Setup:
        """This work under other knobs. A step is taken to last in proportion to its batch."""
        scale = limits.batch_size / self.batch_size

        @cache
        def fate(draw: int) -> Fate:
            # The fractional parts of the multiples of the golden ratio: evenly spread, and the same for every choice.
            return Fate(self.group_s(draw), self.outcomes.of(draw * 0.6180339887498949 % 1))

        return Setup(
            limits,
            fate,
            lambda step: self.train_s(step) * scale,
            engines=engines,
            speed=self.speed,
            publish_every=publish_every,
            transfer_s=self.transfer_s,
            pause_s=self.pause_s,
        )

    def generation_per_s(self, max_running: int, engines: int, num_draws: int) -> float:
        """Groups to train on that engines finish in a second when so many are always under way.

        Of the first so many draws: the mean of a heavy-tailed sample is not that of its distribution.
        """
        mean = sum(self.group_s(draw) for draw in range(num_draws)) / num_draws
        kept = 1 - self.outcomes.filtered - self.outcomes.quarantined
        return kept * max_running * self.speed.at(max(1, round(max_running / engines))) / mean

    @property
    def training_per_s(self) -> float:
        """Groups that are trained on in a second when batches are always there and nothing is published."""
        return self.batch_size / self.train_s.mean


def saturating(groups: int) -> Speed:
    """So many groups on an engine do not slow each other down; more of them share what these got done."""
    points = [(float(groups), 1.0)]
    more = groups + 1
    while more <= max(_LARGEST, 2 * groups):
        points.append((float(more), groups / more))
        # Linear between two points: close enough to the curve when they are a few percent apart.
        more = max(more + 1, round(more * 1.05))
    return Speed(points)
