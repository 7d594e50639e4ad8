"""What a run is made of: how long groups, steps and publishes take, and what becomes of groups.

Place on the way: options of `spurline simulate`, on top of what an earlier run measured -> Workload, which knows what
its numbers rest on -> one Setup of the model for each choice of knobs. Times are functions of the number of a draw or
a step: the same number always gives the same value, whatever came before.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np

from spurline_async_rl.scheduling.scheduler import SchedulerLimits


@dataclass(frozen=True)
class Times:
    """A time for each number: one of `values` at random, each as likely as any other, multiplied by a lognormal factor
    of mean 1. sigma: of its logarithm; 0 is none. A `late_share` of the times is `late_factor` times as long."""

    values: Sequence[float]
    sigma: float = 0.0
    late_share: float = 0.0
    late_factor: float = 1.0
    seed: int = 0

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) * (1 + self.late_share * (self.late_factor - 1))

    def __call__(self, number: int) -> float:
        generator = np.random.default_rng((self.seed, number, 0))
        time = self.values[int(generator.integers(len(self.values)))]
        time *= math.exp(self.sigma * generator.standard_normal() - self.sigma**2 / 2)
        # A stream of its own: which groups are late has nothing to do with how long they are.
        late = self.late_share > 0 and np.random.default_rng((self.seed, number, 1)).random() < self.late_share
        return time * (self.late_factor if late else 1.0)


@dataclass(frozen=True)
class Speed:
    """Work one group gets done in a second, by the number of groups on its engine.

    points: (groups, work per second), groups ascending; linear between them and constant beyond. The unit of work is
    that of the groups' work: a speed of 1 makes it seconds, tokens per second make it tokens of the longest response.
    """

    points: Sequence[tuple[float, float]] = ((1.0, 1.0),)

    def __post_init__(self) -> None:
        assert self.points, "a speed needs at least one point"
        assert all(speed > 0 for _, speed in self.points), f"speeds have to be positive: {self.points}"
        assert all(left[0] < right[0] for left, right in pairwise(self.points)), f"not ascending: {self.points}"

    def at(self, groups: int) -> float:
        place = bisect_right(self.points, groups, key=lambda point: point[0])
        if place in (0, len(self.points)):
            return self.points[max(place - 1, 0)][1]
        (left, low), (right, high) = self.points[place - 1 : place + 1]
        return low + (high - low) * (groups - left) / (right - left)


WORK_IN_SECONDS = Speed()
"""However many run, each takes the seconds that its work says."""
_LARGEST = 4096
"""Groups on one engine up to which a saturated one gets slower; more are taken to be as slow as these."""


def saturating(groups: int) -> Speed:
    """So many groups on an engine do not slow each other down; more of them share what these got done."""
    points = [(float(groups), 1.0)]
    more = groups + 1
    while more <= max(_LARGEST, 2 * groups):
        points.append((float(more), groups / more))
        # Linear between two points: close enough to the curve when they are a few percent apart.
        more = max(more + 1, round(more * 1.05))
    return Speed(points)


Outcome = Literal["kept", "filtered", "quarantined", "skipped", "unreadable"]
"""filtered: its rewards are equal and it makes way for another. skipped: its row is found unusable by an attempt;
unreadable: when it is drawn."""


@dataclass(frozen=True)
class Fate:
    """What becomes of a drawn prompt. work: of one attempt, in the unit of the engines' speed. retries: attempts of as
    much work that fail before."""

    work: float
    outcome: Outcome = "kept"
    retries: int = 0


@dataclass(frozen=True)
class Setup:
    """What is simulated.

    fate: by draw. train_s: by 1-based step. engines, speed: what generates. After every `publish_every` steps weights
    are published: `transfer_s` while engines go on, then `pause_s` during which they stand still; the trainer waits for
    both.
    """

    limits: SchedulerLimits
    fate: Callable[[int], Fate]
    train_s: Callable[[int], float]
    engines: int = 1
    speed: Speed = WORK_IN_SECONDS
    publish_every: int = 1
    transfer_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Times in seconds.

    group_s: of a group, by draw, on an engine that is not saturated. speed: how fast groups get on, by how many are on
    their engine. train_s: from one batch to the next without waiting or publishing, for batches of `batch_size` groups.
    filtered, quarantined: shares of the groups that make way for another one. transfer_s, pause_s: of a publish, with
    engines going on and standing still. basis: where the numbers come from.
    """

    group_s: Callable[[int], float]
    train_s: Times
    batch_size: int
    speed: Speed = WORK_IN_SECONDS
    filtered: float = 0.0
    quarantined: float = 0.0
    transfer_s: float = 0.0
    pause_s: float = 0.0
    basis: Sequence[str] = field(default_factory=list[str])

    def setup(self, limits: SchedulerLimits, engines: int, publish_every: int) -> Setup:
        """This work under other knobs. A step is taken to last in proportion to its batch."""
        scale = limits.batch_size / self.batch_size

        @cache
        def fate(draw: int) -> Fate:
            # The fractional parts of the multiples of the golden ratio: evenly spread, and the same for every choice.
            chance = draw * 0.6180339887498949 % 1
            left_out: Outcome = "filtered" if chance < self.filtered else "quarantined"
            return Fate(self.group_s(draw), left_out if chance < self.filtered + self.quarantined else "kept")

        def train_s(step: int) -> float:
            return self.train_s(step) * scale

        return Setup(limits, fate, train_s, engines, self.speed, publish_every, self.transfer_s, self.pause_s)

    def generation_per_s(self, max_running: int, engines: int, num_draws: int) -> float:
        """Groups to train on that engines finish in a second when so many are always under way.

        Of the first so many draws: the mean of a heavy-tailed sample is not that of its distribution.
        """
        mean = sum(self.group_s(draw) for draw in range(num_draws)) / num_draws
        kept = 1 - self.filtered - self.quarantined
        return kept * max_running * self.speed.at(max(1, round(max_running / engines))) / mean

    @property
    def training_per_s(self) -> float:
        """Groups that are trained on in a second when batches are always there and nothing is published."""
        return self.batch_size / self.train_s.mean
