"""Describe a run to simulate: how long groups, steps and publishes take, and what becomes of groups.

Place on the way: options of `spurline simulate`, what an earlier run measured, or both -> Workload -> the model. The
workload says what its numbers rest on, so that a prediction can say so too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np

from spurline.errors import UserError
from spurline_async_rl.scheduling.depth import Depth
from spurline_async_rl.scheduling.scheduler import AtBound, Order, SchedulerLimits
from spurline_async_rl.timeline.records import GroupState

_LARGEST = 4096
"""Groups on one engine up to which a saturated engine gets slower."""
_DRAWS_PER_GROUP = 8


@dataclass(frozen=True)
class Knobs:
    """The settings that a simulation compares."""

    max_staleness: int
    batch_size: int
    max_running: int
    engines: int = 1
    publish_every: int = 1
    order: Order = "window"
    at_bound: AtBound = "wait"
    depth: Depth = "auto"

    @property
    def most_running(self) -> int:
        """Groups that may run at once within the bound."""
        return self.batch_size * (self.max_staleness + 1)

    @property
    def is_allowed(self) -> bool:
        return (
            0 < self.engines <= self.max_running <= self.most_running
            and self.max_staleness >= self.publish_every - 1
            and self.batch_size > 0
            and (isinstance(self.depth, str) or self.batch_size <= self.depth <= self.most_running)
        )

    def limits(self, num_batches: int) -> SchedulerLimits:
        """Return the scheduler's limits in a run of so many batches."""
        return SchedulerLimits(
            self.max_staleness,
            self.batch_size,
            self.max_running,
            self.order,
            self.at_bound,
            _DRAWS_PER_GROUP * self.batch_size,
            num_batches,
            self.depth,
        )

    def with_engines(self, engines: int) -> Knobs:
        """Return knobs with as many groups on each engine as now, as far as the bound allows."""
        groups = max(1, self.max_running * engines // self.engines)
        return replace(self, engines=engines, max_running=min(self.most_running, groups))


@dataclass(frozen=True)
class Speed:
    """The work that one group gets done in a second, by the number of groups on its engine.

    points: (groups, work per second), groups ascending; linear between them and constant beyond. A speed of 1 makes the
    unit of work a second.
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
"""The speed of engines on which a group takes equally long however many run beside it."""


def saturating(groups: int) -> Speed:
    """Return the speed of engines that so many groups saturate: more of them share what these get done."""
    points = [(float(groups), 1.0)]
    more = groups + 1
    while more <= max(_LARGEST, 2 * groups):
        points.append((float(more), groups / more))
        # Linear between two points: close enough to the curve when they are a few percent apart.
        more = max(more + 1, round(more * 1.05))
    return Speed(points)


@dataclass(frozen=True)
class Times:
    """A time for each number: one of `values` at random, multiplied by a lognormal factor of mean 1.

    sigma: of the factor's logarithm. A `late_share` of the times is `late_factor` times as long.
    """

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
class Fate:
    """The fate of a drawn prompt.

    work: of one attempt, in the unit of the engines' speed. outcome: known when its attempts are over; `unreadable`
    when it is drawn. retries: attempts of as much work that fail before.
    """

    work: float
    outcome: GroupState | Literal["unreadable"] = "buffered"
    retries: int = 0


@dataclass(frozen=True)
class Workload:
    """The times of a run, in seconds.

    group_s: of a group, on an engine that is not saturated. train_s: from one batch to the next without waiting or
    publishing, for batches of `batch_size` groups. speed: of engines, by their groups. filtered, quarantined: shares of
    the groups. transfer_s, pause_s: of a publish, with engines going on and standing still. basis: where the numbers
    come from.
    """

    group_s: Callable[[int], float]
    train_s: Times
    batch_size: int
    speed: Speed = WORK_IN_SECONDS
    filtered: float = 0.0
    quarantined: float = 0.0
    transfer_s: float = 0.0
    pause_s: float = 0.0
    basis: Sequence[str] = ()

    def but(self, told: str, **changes: Any) -> Self:
        """Return a copy with these fields changed; `told` says what they rest on."""
        return replace(self, basis=[*self.basis, told], **changes)

    def fate(self, draw: int) -> Fate:
        # The fractional parts of the multiples of the golden ratio: evenly spread, and the same for every choice.
        number = draw * 0.6180339887498949 % 1
        left = "filtered" if number < self.filtered else "quarantined"
        return Fate(self.group_s(draw), left if number < self.filtered + self.quarantined else "buffered")

    def step_s(self, step: int, batch_size: int) -> float:
        """Return the seconds of a step, which are in proportion to its groups."""
        return self.train_s(step) * (batch_size / self.batch_size)

    def generation_per_s(self, knobs: Knobs, num_draws: int) -> float:
        """Return the groups to train on that engines finish in a second when they are always full.

        num_draws: the first draws count. The mean of a heavy-tailed sample is not that of its distribution.
        """
        mean = sum(self.group_s(draw) for draw in range(num_draws)) / num_draws
        kept = 1 - self.filtered - self.quarantined
        beside = max(1, round(knobs.max_running / knobs.engines))
        return kept * knobs.max_running * self.speed.at(beside) / mean

    @property
    def training_per_s(self) -> float:
        """Groups that are trained on in a second when batches are always there and nothing is published."""
        return self.batch_size / self.train_s.mean


@dataclass(frozen=True)
class GivenTimes:
    """The times that a command line gives; None where it does not. sigma: of the logarithm of group times."""

    group_s: float | None = None
    sigma: float = 0.0
    saturation: int | None = None
    step_s: float | None = None
    publish_s: float | None = None
    pause_s: float | None = None


def workload_of(given: GivenTimes, knobs: Knobs, measured: Workload | None, origin: str) -> Workload:
    """Return the measured workload with what is given in place of what was measured.

    Args:
        given: Times from the command line.
        knobs: The config's own.
        measured: What an earlier run tells; without it groups and steps must be given.
        origin: Names the config in errors.

    Raises:
        UserError: If a time is missing, or the given ones contradict each other.
    """
    workload = measured
    if workload is None:
        workload = Workload(Times([1.0]), Times([1.0]), knobs.batch_size)
        _check_complete(given, origin)
    saturation, why = given.saturation, "as given"
    if given.group_s is not None:
        told = f"{given.group_s:g} s for a group, lognormal with sigma {given.sigma:g}, as given"
        workload = workload.but(told, group_s=Times([given.group_s], given.sigma))
        if saturation is None:
            saturation, why = max(1, -(-knobs.max_running // knobs.engines)), "as many as the config runs"
    elif given.sigma:
        raise UserError("--sigma says how far --group-seconds spread, which is missing. Give both, or neither.")
    if saturation is not None:
        told = f"{saturation} groups saturate an engine ({why}): fewer are no faster, more share what these get done"
        workload = workload.but(told, speed=saturating(saturation))
    if given.step_s is not None:
        told = f"{given.step_s:g} s for a step of {knobs.batch_size} groups, as given"
        workload = workload.but(told, train_s=Times([given.step_s]), batch_size=knobs.batch_size)
    return _with_publishes(workload, given, is_measured=measured is not None)


def _check_complete(given: GivenTimes, origin: str) -> None:
    options = {"--group-seconds": given.group_s, "--step-seconds": given.step_s}
    missing = " and ".join(option for option, value in options.items() if value is None)
    if missing:
        raise UserError(
            f"{origin}: {missing} missing. Give --from RUN_DIR, an earlier run of source async_rollouts that measured "
            "it, or --group-seconds, the time of one group with all its attempts, and --step-seconds, the time of one "
            "update."
        )


def _with_publishes(workload: Workload, given: GivenTimes, *, is_measured: bool) -> Workload:
    if given.publish_s is None and given.pause_s is None:
        return workload if is_measured else workload.but("publishing weights takes no time")
    whole = workload.transfer_s + workload.pause_s if given.publish_s is None else given.publish_s
    still = whole if given.pause_s is None else given.pause_s
    if still > whole:
        raise UserError(
            f"--pause-seconds {still:g}: engines cannot stand still longer than the {whole:g} s that a publish takes. "
            "Raise --publish-seconds."
        )
    told = f"{whole:g} s for a publish, engines standing still for {still:g} s of it, as given"
    return workload.but(told, transfer_s=whole - still, pause_s=still)
