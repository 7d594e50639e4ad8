"""What a run is made of: how long groups, steps and publishes take, and what becomes of groups.

Place on the way: options of `spurline simulate`, what an earlier run measured, or both -> Workload -> the model, once
for each choice of knobs. Knows what the numbers rest on, so that a prediction can say so.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from spurline.errors import UserError
from spurline_async_rl.scheduling.depth import Depth
from spurline_async_rl.scheduling.scheduler import AtBound, Order, SchedulerLimits
from spurline_async_rl.timeline.records import GroupState

_LARGEST = 4096
"""Groups on one engine up to which a saturated one gets slower; more are taken to be as slow as these."""
_DRAWS_PER_GROUP = 8
_GROUPS_SAMPLED = 1000


@dataclass(frozen=True)
class Knobs:
    """What one may choose: S, B, K, engines, publish_every, depth, and the rules of the scheduler."""

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
        """More groups at once would not keep the bound."""
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
        """What the scheduler may do in a run of so many batches."""
        draws = _DRAWS_PER_GROUP * self.batch_size
        return SchedulerLimits(
            self.max_staleness,
            self.batch_size,
            self.max_running,
            self.order,
            self.at_bound,
            draws,
            num_batches,
            self.depth,
        )

    def with_engines(self, engines: int) -> Knobs:
        """As many groups on each engine as now, as far as the bound allows."""
        groups = max(1, self.max_running * engines // self.engines)
        return replace(self, engines=engines, max_running=min(self.most_running, groups))


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


def saturating(groups: int) -> Speed:
    """So many groups on an engine do not slow each other down; more of them share what these got done."""
    points = [(float(groups), 1.0)]
    more = groups + 1
    while more <= max(_LARGEST, 2 * groups):
        points.append((float(more), groups / more))
        # Linear between two points: close enough to the curve when they are a few percent apart.
        more = max(more + 1, round(more * 1.05))
    return Speed(points)


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
class Attempts:
    """How the tokens of a group are spread over its time, which is that of its longest attempt.

    All attempts begin with the group, and each makes tokens until its end: many at first, and few while the longest is
    left alone. count: of a group. sigma: of the logarithm of their lengths, which are taken to be lognormal.
    """

    count: int = 1
    sigma: float = 0.0

    def made_by(self, time: float) -> float:
        """Share of a group's tokens that are made when this share of its time is over."""
        if self.count == 1 or self.sigma == 0:
            return time
        return float(np.interp(time, *self._curve))

    @cached_property
    def _curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Shares of the time, and of the tokens, over many groups together."""
        normal = np.random.default_rng(0).standard_normal((_GROUPS_SAMPLED, self.count))
        lengths = np.exp(self.sigma * normal)
        longest = lengths.max(axis=1, keepdims=True)
        times = np.linspace(0, 1, 65)
        return times, np.array([np.minimum(lengths, time * longest).sum() for time in times]) / lengths.sum()


def fitted_sigma(longest: float, num_attempts: int) -> float:
    """Spread of lognormal lengths of which the longest of so many is usually so many times as long as the mean."""
    if longest <= 1 or num_attempts < 2:
        return 0.0
    # The median of the maximum, exp(sigma z), over the mean, exp(sigma^2 / 2); the smaller root.
    z = NormalDist().inv_cdf(0.5 ** (1 / num_attempts))
    return z - math.sqrt(max(0.0, z * z - 2 * math.log(longest)))


@dataclass(frozen=True)
class Fate:
    """What becomes of a drawn prompt. work: of one attempt, in the unit of the engines' speed. outcome: shows when its
    attempts are over, `unreadable` when it is drawn. retries: attempts of as much work that fail before."""

    work: float
    outcome: GroupState | Literal["unreadable"] = "buffered"
    retries: int = 0


@dataclass(frozen=True)
class Workload:
    """Times in seconds.

    group_s: of a group, on an engine that is not saturated. train_s: from one batch to the next without waiting or
    publishing, for batches of `batch_size` groups. speed: how fast groups get on, by how many are on their engine.
    filtered, quarantined: shares of the groups. transfer_s, pause_s: of a publish, with engines going on and standing
    still; the trainer waits for both. attempts: of a group. basis: where the numbers come from.
    """

    group_s: Callable[[int], float]
    train_s: Times
    batch_size: int
    speed: Speed = WORK_IN_SECONDS
    filtered: float = 0.0
    quarantined: float = 0.0
    transfer_s: float = 0.0
    pause_s: float = 0.0
    attempts: Attempts = Attempts()
    basis: Sequence[str] = ()

    def but(self, told: str, **changes: Any) -> Self:
        """With these fields changed, which rests on what is told."""
        return replace(self, basis=[*self.basis, told], **changes)

    def with_groups(
        self, knobs: Knobs, group_s: float | None, sigma: float, stragglers: str | None, saturation: int | None
    ) -> Workload:
        """With what is given of groups. Raises UserError when that cannot be."""
        workload, why = self, "as given"
        if group_s is not None:
            told = f"{group_s:g} s for a group, lognormal with sigma {sigma:g}, as given"
            workload = workload.but(told, group_s=Times([group_s], sigma))
        elif sigma:
            raise UserError("--sigma says how far --group-seconds spread, which is not given. Give both, or neither.")
        if stragglers is not None:
            share, factor = parse_stragglers(stragglers)
            told = f"{share:.2%} of the groups take {factor:g} times as long, as given"
            assert isinstance(workload.group_s, Times), workload
            late = replace(workload.group_s, late_share=share, late_factor=factor)
            workload = workload.but(told, group_s=late)
        if saturation is None and group_s is not None:
            saturation, why = max(1, -(-knobs.max_running // knobs.engines)), "as many as the config runs"
        if saturation is None:
            return workload
        told = f"engines are saturated by {saturation} groups each ({why})"
        return workload.but(f"{told}: fewer are no faster, more share what these do", speed=saturating(saturation))

    def with_steps(self, knobs: Knobs, step_s: float | None) -> Workload:
        """With what is given of steps, if anything is."""
        if step_s is None:
            return self
        told = f"{step_s:g} s for a step of {knobs.batch_size} groups, as given"
        return self.but(told, train_s=Times([step_s]), batch_size=knobs.batch_size)

    def with_attempts(self, count: int, sigma: float | None, group_sigma: float) -> Workload:
        """With so many attempts in a group, whose lengths spread as given, or else as the groups' times do."""
        attempts = Attempts(count, group_sigma if sigma is None else sigma)
        if attempts.count == 1 or attempts.sigma == 0:
            return replace(self, attempts=attempts)
        why = "as given" if sigma is not None else "taken to be as of groups"
        told = (
            f"the {count} attempts of a group are of different lengths, lognormal with sigma {attempts.sigma:g}, {why}"
        )
        return self.but(told, attempts=attempts)

    def with_left_out(self, share: float | None) -> Workload:
        """With what is given of groups that make way for others, if anything is. Raises UserError for no share."""
        if share is None:
            return self
        if not 0 <= share < 1:
            raise UserError(f"--left-out {share:g}: a share is needed, at least 0 and less than 1.")
        return self.but(f"{share:.1%} of the groups are left out for equal rewards, as given", filtered=share)

    def with_publishes(self, publish_s: float | None, pause_s: float | None) -> Workload:
        """With what is given of publishing. Raises UserError when that cannot be."""
        whole = self.transfer_s + self.pause_s if publish_s is None else publish_s
        still = whole if pause_s is None else pause_s
        if still > whole:
            raise UserError(
                f"--pause-seconds {still:g}: engines cannot stand still longer than the {whole:g} s that a publish "
                "takes. Raise --publish-seconds."
            )
        told = f"{whole:g} s for a publish, engines standing still for {still:g} s of it, as given"
        return self.but(told, transfer_s=whole - still, pause_s=still)

    def fate(self, draw: int) -> Fate:
        """What becomes of the prompt of this draw."""
        # The fractional parts of the multiples of the golden ratio: evenly spread, and the same for every choice.
        number = draw * 0.6180339887498949 % 1
        left = "filtered" if number < self.filtered else "quarantined"
        return Fate(self.group_s(draw), left if number < self.filtered + self.quarantined else "buffered")

    def step_s(self, step: int, batch_size: int) -> float:
        """Of a batch with so many groups: a step is taken to last in proportion to them."""
        return self.train_s(step) * (batch_size / self.batch_size)

    def generation_per_s(self, knobs: Knobs, num_draws: int) -> float:
        """Groups to train on that engines finish in a second when as many as may be are always under way.

        Of the first so many draws: the mean of a heavy-tailed sample is not that of its distribution.
        """
        mean = sum(self.group_s(draw) for draw in range(num_draws)) / num_draws
        kept = 1 - self.filtered - self.quarantined
        beside = max(1, round(knobs.max_running / knobs.engines))
        return kept * knobs.max_running * self.speed.at(beside) / mean

    @property
    def training_per_s(self) -> float:
        """Groups that are trained on in a second when batches are always there and nothing is published."""
        return self.batch_size / self.train_s.mean


def given_workload(knobs: Knobs, group_s: float | None, step_s: float | None, origin: str) -> Workload:
    """What there is to begin with where no run was measured. Raises UserError naming `origin`, the config, without both
    times."""
    if group_s is not None and step_s is not None:
        return Workload(Times([group_s]), Times([step_s]), knobs.batch_size)
    options = {"--group-seconds": group_s, "--step-seconds": step_s}
    missing = " and ".join(option for option, value in options.items() if value is None)
    raise UserError(
        f"{origin}: how long things take is not known: {missing} missing. Give --from RUN_DIR, an earlier run of "
        "source async_rollouts that measured it, or --group-seconds, the time of one group with all its attempts, and "
        "--step-seconds, the time of one update."
    )


def parse_stragglers(text: str) -> tuple[float, float]:
    """Share and factor of `0.01x10`. Raises UserError."""
    number = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
    match = re.fullmatch(rf"\s*{number}\s*(%?)\s*x\s*{number}\s*", text)
    share, factor = (float(match[1]) / (100 if match[2] else 1), float(match[3])) if match else (2.0, 0.0)
    if share > 1 or factor == 0:
        raise UserError(
            f"--stragglers {text}: expected SHARExFACTOR, such as 0.01x10: one group in a hundred takes ten times as "
            "long."
        )
    return share, factor
