"""Read how long things took in an earlier run: its timeline and metrics -> Workload.

What the run tells of its engines is how fast groups got on with as many beside them as there were; see `_speed`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from spurline.errors import UserError
from spurline.run.record_files import CONFIG_FILE, check_run_directory, read_mapping
from spurline.trackers.jsonl import METRICS_FILE, read_metrics
from spurline_async_rl.simulation.workload import Attempts, Speed, Times, Workload, fitted_sigma, saturating
from spurline_async_rl.timeline.records import TIMELINE_FILE, GroupSpan, read_timeline

_FEWEST_GROUPS = 8
_BINS = 4
_SPREAD = 1.5
"""How much the most groups under way have to exceed the fewest before their speeds say anything."""


def measured_workload(run_dir: Path) -> Workload:
    """Raises UserError when the run left too little to go by, and RunDirectoryError when that is no run directory, or
    holds an unreadable file."""
    check_run_directory(run_dir)
    # Lines that no run has written do no harm here, and are told of.
    metrics = read_metrics(run_dir / METRICS_FILE, skip_foreign=True)
    source: dict[str, Any] = read_mapping(run_dir / CONFIG_FILE).get("source") or {}
    records = read_timeline(run_dir / TIMELINE_FILE)
    groups = [group for record in records for group in record.groups if group.ended > group.began]
    # From step to step, without waiting, publishing and evaluating; the first one, with its cold start, left out.
    train_s: list[float] = []
    for before, record in pairwise(records):
        beside_s = sum(span.seconds for span in record.spans if span.kind in ("wait", "publish", "evaluate"))
        train_s.append(max(1e-3, record.until - before.until - beside_s))
    if len(groups) < _FEWEST_GROUPS or not train_s:
        raise UserError(
            f"{run_dir}: {TIMELINE_FILE} has {len(groups)} groups and {len(records)} steps, too few to go by: at least "
            f"{_FEWEST_GROUPS} groups and 2 steps are needed. Give the run_dir of a longer run of source "
            "async_rollouts, or --group-seconds and --step-seconds."
        )
    publishes = [span for record in records for span in record.spans if span.kind == "publish"]
    publish_s = fmean(span.seconds for span in publishes) if publishes else 0.0
    pauses = list(_series(metrics, "time/sync_pause").values())
    pause_s = min(publish_s, fmean(pauses)) if pauses else publish_s
    paused_share = pause_s / publish_s if publish_s else 0.0

    def generating_s(group: GroupSpan) -> float:
        """Without the time that engines stood still."""
        overlaps = (min(span.ended, group.ended) - max(span.began, group.began) for span in publishes)
        return max(1e-3, group.seconds - paused_share * sum(overlap for overlap in overlaps if overlap > 0))

    group_s = [generating_s(group) for group in groups]
    engines: int = source.get("engine", {}).get("engines", 1)
    beside = [count / engines for count in _groups_beside(groups)]
    speed, speed_basis = _speed(groups, group_s, beside)
    work = [seconds * speed.at(max(1, round(count))) for seconds, count in zip(group_s, beside, strict=True)]
    states = [group.state for group in groups]
    filtered, quarantined = (states.count(state) / len(groups) for state in ("filtered", "quarantined"))
    basis = [
        f"{len(groups):,} groups of {run_dir}, {fmean(group_s):.3g} s each on average, the longest "
        f"{max(group_s):.3g} s; {filtered:.1%} were left out, {quarantined:.1%} given up",
        f"{len(train_s):,} steps of {fmean(train_s):.3g} s beside waiting and publishing; publishing took "
        f"{publish_s:.3g} s, during {pause_s:.3g} s of which engines stood still",
        speed_basis,
    ]
    batch_size = max((len(taken.draws) for record in records for taken in record.taken), default=1)
    attempts = _attempts(metrics, source, batch_size)
    if attempts.sigma > 0:
        basis.append(
            f"the {attempts.count} attempts of a group end at different times: lengths spread with sigma "
            f"{attempts.sigma:.2g}, going by the mean and the longest of each step"
        )
    return Workload(
        Times(work),
        Times(train_s),
        batch_size,
        speed,
        filtered,
        quarantined,
        publish_s - pause_s,
        pause_s,
        attempts,
        basis,
    )


def _series(metrics: Sequence[Mapping[str, float]], name: str) -> dict[int, float]:
    """Step -> value of a metric, at the steps that have it."""
    return {int(line["step"]): float(line[name]) for line in metrics if name in line}


def _attempts(metrics: Sequence[Mapping[str, float]], source: Mapping[str, Any], batch_size: int) -> Attempts:
    """How many attempts a group had, and how far their lengths were spread; not at all where that was not measured.

    source: its settings.
    """
    count = int(source.get("samples_per_prompt", 1))
    means, longest = _series(metrics, "response/length"), _series(metrics, "response/length/max")
    ratios = [length / means[step] for step, length in longest.items() if means.get(step, 0) > 0]
    return Attempts(count, fitted_sigma(fmean(ratios), batch_size * count) if ratios else 0.0)


def _speed(groups: Sequence[GroupSpan], seconds: Sequence[float], beside: Sequence[float]) -> tuple[Speed, str]:
    """How fast groups get on beside others, and what that rests on. beside: groups on the engine of each, itself too.

    Where the number of groups under way varied, tokens per second are compared between few and many. Beyond the most
    groups that were seen, engines are taken to be saturated: more of them bring nothing.
    """
    rated = sorted(
        (count, group.tokens / length)
        for count, group, length in zip(beside, groups, seconds, strict=True)
        if group.tokens > 0
    )
    if len(rated) >= 8 * _BINS and rated[-1][0] >= _SPREAD * rated[len(rated) // (2 * _BINS)][0]:
        bins = [rated[part * len(rated) // _BINS : (part + 1) * len(rated) // _BINS] for part in range(_BINS)]
        counts = [max(1.0, fmean(count for count, _ in found)) for found in bins]
        points = _plausible(counts, [fmean(rate for _, rate in found) for found in bins])
        last, at_last = points[-1]
        beyond = [(count, at_last * last / count) for count, _ in saturating(round(last)).points if count > last]
        return Speed([*points, *beyond]), (
            f"a group's speed with {points[0][0]:.3g} to {last:.3g} groups on its engine, as measured; "
            "beyond, engines are taken to be saturated"
        )
    most = max(1, round(max(beside)))
    return saturating(most), (
        f"a group is taken to be as fast as measured with up to {most} groups on its engine, the most there were; "
        "beyond, engines are taken to be saturated"
    )


def _plausible(counts: Sequence[float], rates: Sequence[float]) -> list[tuple[float, float]]:
    """Speeds relative to their mean that do not rise with the number of groups.

    Where measured ones rise, those next to each other are averaged: groups that outlast the others are slow, and end
    beside few, which says nothing about the engine.
    """
    pools: list[list[int]] = []

    def rate(pool: Sequence[int]) -> float:
        return fmean(rates[place] for place in pool)

    for place in range(len(rates)):
        pools.append([place])
        while len(pools) > 1 and rate(pools[-2]) < rate(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    mean = fmean(rates)
    return sorted({counts[place]: rate(pool) / mean for pool in pools for place in pool}.items())


def _groups_beside(groups: Sequence[GroupSpan]) -> list[float]:
    """Groups under way on average during each group's time, itself among them."""
    changes = sorted([(group.began, 1) for group in groups] + [(group.ended, -1) for group in groups])
    times = [at for at, _ in changes]
    running = list(accumulate(change for _, change in changes))
    areas = [
        0.0,
        *accumulate((after - at) * level for at, after, level in zip(times, times[1:], running, strict=False)),
    ]

    def area(at: float) -> float:
        place = bisect_right(times, at) - 1
        return areas[place] + (at - times[place]) * running[place]

    return [(area(group.ended) - area(group.began)) / group.seconds for group in groups]
