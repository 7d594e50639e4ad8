"""Describe the workload of a simulated run: the times of groups, steps and publishes.

The numbers come from the options of `spurline simulate`, from the timeline and metrics of an earlier run, or from both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

import numpy as np

from spurline.errors import UserError
from spurline.run.directory import CONFIG_FILE, check_run_directory, read_mapping
from spurline.trackers.jsonl import METRICS_FILE, read_metrics
from spurline_async_rl.scheduling.depth import Depth
from spurline_async_rl.scheduling.scheduler import AtBound, Order, SchedulerLimits
from spurline_async_rl.timeline.records import TIMELINE_FILE, GroupSpan, GroupState, read_timeline

_DRAWS_PER_GROUP = 8
"""Prompts that may be drawn for each group of a batch. Runs have the same default."""
_FEWEST_GROUPS = 8
"""Fewest groups of an earlier run from which a workload can be measured."""


@dataclass(frozen=True)
class Knobs:
    """The settings that a simulation compares."""

    max_staleness: int
    batch_size: int
    max_running: int
    engines: int = 1
    publish_every: int = 1
    order: Order = "window"
    depth: Depth = "auto"
    at_bound: AtBound = "wait"

    @property
    def most_running(self) -> int:
        """Return how many groups the bound allows to run at once."""
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
        """Return the scheduler's limits in a run of `num_batches` batches."""
        return SchedulerLimits(
            self.max_staleness,
            self.batch_size,
            self.max_running,
            self.order,
            _DRAWS_PER_GROUP * self.batch_size,
            num_batches,
            self.depth,
            self.at_bound,
        )

    def with_engines(self, engines: int) -> Knobs:
        """Return knobs with another number of engines. Each engine runs as many groups as now, if the bound allows."""
        groups = max(1, self.max_running * engines // self.engines)
        return replace(self, engines=engines, max_running=min(self.most_running, groups))


@dataclass(frozen=True)
class Times:
    """Random times, by the number of a draw or step. Each is one of `values` times a lognormal factor of mean 1.

    `sigma` is the standard deviation of the factor's logarithm. A share `late_share` of the times is also multiplied by
    `late_factor`.
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
        # A second generator keeps lateness independent of the time.
        late = self.late_share > 0 and np.random.default_rng((self.seed, number, 1)).random() < self.late_share
        return time * (self.late_factor if late else 1.0)


@dataclass(frozen=True)
class Fate:
    """The work of a drawn prompt and its outcome. Work is the time in seconds on an engine that is not saturated.

    An `unreadable` prompt is skipped when it is drawn.
    """

    work: float
    outcome: GroupState | Literal["unreadable"] = "buffered"


@dataclass(frozen=True)
class Workload:
    """The times of a run, in seconds.

    Attributes:
        group_s: Maps a draw to the time of its group on an engine that is not saturated.
        train_s: The time of a step with `batch_size` groups, without waiting and publishing.
        batch_size: Groups in each step that `train_s` describes.
        saturation: Groups that saturate an engine. With more, each group gets slower; with fewer, none gets faster.
        filtered: The share of filtered groups.
        quarantined: The share of groups that are given up.
        transfer_s: The part of a publish in which engines generate.
        pause_s: The part of a publish in which engines do not generate.
        basis: Sentences for the user about where the numbers come from.
    """

    group_s: Callable[[int], float]
    train_s: Times
    batch_size: int
    saturation: float = math.inf
    filtered: float = 0.0
    quarantined: float = 0.0
    transfer_s: float = 0.0
    pause_s: float = 0.0
    basis: Sequence[str] = ()

    def but(self, told: str, **changes: Any) -> Self:
        """Return a copy with these fields changed. The sentence `told` about the change is added to `basis`."""
        return replace(self, basis=[*self.basis, told], **changes)

    def speed(self, groups: int, engines: int = 1) -> float:
        """Return the work that each of `groups` running groups does in a second."""
        return min(1.0, self.saturation * engines / groups)

    def fate(self, draw: int) -> Fate:
        # Multiples of the golden ratio, modulo 1, are evenly spread and not random.
        number = draw * 0.6180339887498949 % 1
        left = "filtered" if number < self.filtered else "quarantined"
        return Fate(self.group_s(draw), left if number < self.filtered + self.quarantined else "buffered")

    def step_s(self, step: int, batch_size: int) -> float:
        """Return the seconds of a step, in proportion to its groups."""
        return self.train_s(step) * (batch_size / self.batch_size)

    def generation_per_s(self, knobs: Knobs, num_draws: int) -> float:
        """Return how many trainable groups the engines finish in a second if they are always full.

        Only the first `num_draws` draws count, because times with a heavy tail may have another mean over all draws.
        """
        mean = sum(self.group_s(draw) for draw in range(num_draws)) / num_draws
        kept = 1 - self.filtered - self.quarantined
        return kept * knobs.max_running * self.speed(knobs.max_running, knobs.engines) / mean


def workload_of(
    knobs: Knobs,
    measured: Workload | None,
    origin: str,
    *,
    group_s: float | None = None,
    sigma: float = 0.0,
    saturation: int | None = None,
    step_s: float | None = None,
    publish_s: float | None = None,
) -> Workload:
    """Return the measured workload of an earlier run, changed to the times that the command's options give.

    Args:
        knobs: The settings of the config.
        measured: The workload of an earlier run. If None, `group_s` and `step_s` are required.
        origin: The name of the config in errors.
        group_s: The option `--group-seconds`. The arguments after it are the command's other options about times.

    Raises:
        UserError: If a time is missing.
    """
    workload = measured or Workload(Times([1.0]), Times([1.0]), knobs.batch_size)
    options = {"--group-seconds": group_s, "--step-seconds": step_s}
    missing = " and ".join(option for option, value in options.items() if value is None)
    if measured is None and missing:
        raise UserError(
            f"{origin}: {missing} missing. Give --group-seconds, the time of one group with all its attempts, and "
            "--step-seconds, the time of one update. Or give --from RUN_DIR, an earlier run of source async_rollouts."
        )
    why = "as given"
    if group_s is not None:
        told = f"{group_s:g} s for a group, lognormal with sigma {sigma:g}, as given"
        workload = workload.but(told, group_s=Times([group_s], sigma))
        if saturation is None:
            saturation, why = max(1, -(-knobs.max_running // knobs.engines)), "as many as the config runs on each"
    elif sigma:
        raise UserError("--sigma spreads --group-seconds, which is missing. Give both, or neither.")
    if saturation is not None:
        told = f"{saturation} groups saturate an engine ({why}): with more groups, each gets slower"
        workload = workload.but(told, saturation=saturation)
    if step_s is not None:
        told = f"{step_s:g} s for a step of {knobs.batch_size} groups, as given"
        workload = workload.but(told, train_s=Times([step_s]), batch_size=knobs.batch_size)
    if publish_s is None:
        return workload if measured else workload.but("publishing weights takes no time")
    told = f"{publish_s:g} s for a publish, in which engines pause, as given"
    return workload.but(told, transfer_s=0.0, pause_s=publish_s)


def measured_workload(run_dir: Path) -> Workload:
    """Return the workload of an earlier run, from its timeline and metrics.

    The largest number of groups on one engine counts as its saturation, because the run does not show how fast more
    groups would be.

    Raises:
        UserError: If the run was too short.
        RunDirectoryError: If this is not a run directory, or one of its files is unreadable.
    """
    check_run_directory(run_dir)
    metrics = read_metrics(run_dir / METRICS_FILE, skip_foreign=True)
    source: dict[str, Any] = read_mapping(run_dir / CONFIG_FILE).get("source") or {}
    records = read_timeline(run_dir / TIMELINE_FILE)
    groups = [group for record in records for group in record.groups if group.ended > group.began]
    # The first step does not count, because it includes the start of the engines.
    train_s: list[float] = []
    for before, record in pairwise(records):
        beside_s = sum(span.seconds for span in record.spans if span.kind in ("wait", "publish", "evaluate"))
        train_s.append(max(1e-3, record.until - before.until - beside_s))
    if len(groups) < _FEWEST_GROUPS or not train_s:
        raise UserError(
            f"{run_dir}: {TIMELINE_FILE} has {len(groups)} groups and {len(records)} steps, but at least "
            f"{_FEWEST_GROUPS} groups and 2 steps are needed. Give the run_dir of a longer run of source "
            "async_rollouts, or --group-seconds and --step-seconds."
        )
    publishes = [span for record in records for span in record.spans if span.kind == "publish"]
    publish_s = fmean(span.seconds for span in publishes) if publishes else 0.0
    pauses = [line["time/sync_pause"] for line in metrics if "time/sync_pause" in line]
    pause_s = min(publish_s, fmean(pauses)) if pauses else publish_s
    paused_share = pause_s / publish_s if publish_s else 0.0

    def generating_s(group: GroupSpan) -> float:
        """Return the seconds of a group, without the time in which engines paused."""
        overlaps = (min(span.ended, group.ended) - max(span.began, group.began) for span in publishes)
        return max(1e-3, group.seconds - paused_share * sum(overlap for overlap in overlaps if overlap > 0))

    group_s = [generating_s(group) for group in groups]
    states = [group.state for group in groups]
    filtered, quarantined = (states.count(state) / len(groups) for state in ("filtered", "quarantined"))
    engines: int = source.get("engine", {}).get("engines", 1)
    # For equal times, sorting puts ends first.
    changes = sorted([(group.began, 1) for group in groups] + [(group.ended, -1) for group in groups])
    most = max(1, round(max(accumulate(change for _, change in changes)) / engines))
    batch_size = max((len(taken.draws) for record in records for taken in record.taken), default=1)
    return Workload(
        Times(group_s),
        Times(train_s),
        batch_size,
        most,
        filtered,
        quarantined,
        publish_s - pause_s,
        pause_s,
        [
            f"{len(groups):,} groups of {run_dir}, {fmean(group_s):.3g} s each on average, the longest "
            f"{max(group_s):.3g} s; {filtered:.1%} were filtered, {quarantined:.1%} given up",
            f"{len(train_s):,} steps of {fmean(train_s):.3g} s without waiting and publishing; publishing took "
            f"{publish_s:.3g} s, and engines paused for {pause_s:.3g} s of this time",
            f"at most {most} groups ran on one engine; with more, each gets slower (--saturation changes this)",
        ],
    )
