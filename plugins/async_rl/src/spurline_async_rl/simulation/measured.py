"""Where a Workload comes from: what an earlier run measured, and what the options of `spurline simulate` say.

In: the timeline and metrics of a run, and the options, which win. Out: a Workload that says what it rests on. What a
run tells of its engines is how fast groups got on with as many beside them as there were; see `_speed`.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from spurline.errors import UserError
from spurline.report.record import read_record
from spurline_async_rl.simulation.prediction import Knobs
from spurline_async_rl.simulation.workload import (
    Constant,
    Empirical,
    LogNormal,
    Outcomes,
    Speed,
    Stragglers,
    Workload,
    saturating,
)
from spurline_async_rl.timeline.records import TIMELINE_FILE, GroupSpan, Span, StepRecord, read_timeline


@dataclass(frozen=True)
class GivenNumbers:
    """Options, None where one was not given; see the command's help."""

    from_run: Path | None = None
    group_seconds: float | None = None
    sigma: float = 0.0
    stragglers: str | None = None
    saturation: int | None = None
    step_seconds: float | None = None
    publish_seconds: float | None = None
    pause_seconds: float | None = None
    left_out: float | None = None


def given_workload(numbers: GivenNumbers, knobs: Knobs, origin: str) -> Workload:
    """Raises UserError when the numbers do not suffice, or cannot be."""
    if numbers.from_run is not None:
        base = measured_workload(numbers.from_run)
    elif numbers.group_seconds is None or numbers.step_seconds is None:
        missing = [
            option
            for option, value in (("--group-seconds", numbers.group_seconds), ("--step-seconds", numbers.step_seconds))
            if value is None
        ]
        raise UserError(
            f"{origin}: how long things take is not known: {' and '.join(missing)} missing. Give --from RUN_DIR, an "
            "earlier run of source async_rollouts that measured it, or --group-seconds, the time of one group with "
            "all its attempts, and --step-seconds, the time of one update."
        )
    else:
        base = Workload(Constant(1.0), Constant(1.0), knobs.batch_size)
    workload = _with_groups(base, numbers, knobs)
    if numbers.step_seconds is not None:
        told = f"{numbers.step_seconds:g} s for a step of {knobs.batch_size} groups, as given"
        workload = replace(
            workload,
            train_s=Constant(numbers.step_seconds),
            batch_size=knobs.batch_size,
            basis=[*workload.basis, told],
        )
    return _with_publishes(_with_outcomes(workload, numbers), numbers)


def parse_stragglers(text: str) -> tuple[float, float]:
    """Share and factor of `0.01x10`. Raises UserError."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(%?)\s*x\s*([0-9.]+)\s*", text)
    try:
        share, factor = (float(match[1]) / (100 if match[2] else 1), float(match[3])) if match else (2.0, 0.0)
    except ValueError:
        share, factor = 2.0, 0.0
    if not (0 <= share <= 1 and factor > 0):
        raise UserError(
            f"--stragglers {text}: expected SHARExFACTOR, such as 0.01x10: one group in a hundred takes ten times as "
            "long."
        )
    return share, factor


def _with_groups(base: Workload, numbers: GivenNumbers, knobs: Knobs) -> Workload:
    workload, basis = base, list(base.basis)
    if numbers.group_seconds is not None:
        group_s = LogNormal(numbers.group_seconds, numbers.sigma)
        basis.append(f"{numbers.group_seconds:g} s for a group, lognormal with sigma {numbers.sigma:g}, as given")
        workload = replace(workload, group_s=group_s)
    elif numbers.sigma:
        raise UserError("--sigma says how far --group-seconds spread, which is not given. Give both, or neither.")
    if numbers.stragglers is not None:
        share, factor = parse_stragglers(numbers.stragglers)
        basis.append(f"{share:.2%} of the groups take {factor:g} times as long, as given")
        workload = replace(workload, group_s=Stragglers(workload.group_s, share, factor))
    saturation = numbers.saturation
    if saturation is None and numbers.group_seconds is not None:
        saturation = max(1, -(-knobs.max_running // knobs.engines))
    if saturation is not None:
        why = "as given" if numbers.saturation is not None else "as many as the config runs"
        basis.append(
            f"engines are saturated by {saturation} groups each ({why}): fewer are no faster, more share what these do"
        )
        workload = replace(workload, speed=saturating(saturation))
    return replace(workload, basis=basis)


def _with_outcomes(workload: Workload, numbers: GivenNumbers) -> Workload:
    if numbers.left_out is None:
        return workload
    if not 0 <= numbers.left_out < 1:
        raise UserError(f"--left-out {numbers.left_out:g}: a share is needed, at least 0 and less than 1.")
    told = f"{numbers.left_out:.1%} of the groups are left out for equal rewards, as given"
    return replace(
        workload,
        outcomes=Outcomes(numbers.left_out, workload.outcomes.quarantined),
        basis=[*workload.basis, told],
    )


def _with_publishes(workload: Workload, numbers: GivenNumbers) -> Workload:
    publish_s, pause_s = numbers.publish_seconds, numbers.pause_seconds
    if publish_s is None and pause_s is None:
        known = workload.transfer_s + workload.pause_s > 0 or numbers.from_run is not None
        basis: Sequence[str] = workload.basis if known else [*workload.basis, "publishing weights takes no time"]
        return replace(workload, basis=basis)
    whole = publish_s if publish_s is not None else workload.transfer_s + workload.pause_s
    still = pause_s if pause_s is not None else whole
    if still > whole:
        raise UserError(
            f"--pause-seconds {still:g}: engines cannot stand still longer than the {whole:g} s that a publish takes. "
            "Raise --publish-seconds."
        )
    told = f"{whole:g} s for a publish, engines standing still for {still:g} s of it, as given"
    return replace(workload, transfer_s=whole - still, pause_s=still, basis=[*workload.basis, told])


_FEWEST_GROUPS = 8
_BINS = 4
_SPREAD = 1.5
"""How much the most groups under way have to exceed the fewest before their speeds say anything."""


def measured_workload(run_dir: Path) -> Workload:
    """Raises UserError when the run left too little to go by."""
    run = read_record(run_dir)
    records = read_timeline(run_dir / TIMELINE_FILE)
    groups = [group for record in records for group in record.groups if group.ended > group.began]
    train_s = _train_seconds(records)
    if len(groups) < _FEWEST_GROUPS or not train_s:
        raise UserError(
            f"{run_dir}: {TIMELINE_FILE} has {len(groups)} groups and {len(records)} steps, too few to go by: at least "
            f"{_FEWEST_GROUPS} groups and 2 steps are needed. Give the run_dir of a longer run of source "
            "async_rollouts, or --group-seconds and --step-seconds."
        )
    publishes = [span for record in records for span in record.spans if span.kind == "publish"]
    publish_s = statistics.fmean(span.ended - span.began for span in publishes) if publishes else 0.0
    _, pauses = run.series("time/sync_pause")
    pause_s = min(publish_s, statistics.fmean(pauses)) if pauses else publish_s
    group_s = [_seconds(group, publishes, pause_s / publish_s if publish_s else 0.0) for group in groups]
    engines = _engines(run.config)
    beside = [count / engines for count in _groups_beside(groups)]
    speed, speed_basis = _speed(groups, group_s, beside)
    work = [seconds * speed.at(max(1, round(count))) for seconds, count in zip(group_s, beside, strict=True)]
    states = [group.state for group in groups]
    outcomes = Outcomes(states.count("filtered") / len(groups), states.count("quarantined") / len(groups))
    basis = [
        f"{len(groups):,} groups of {run_dir}, {statistics.fmean(group_s):.3g} s each on average, the longest "
        f"{max(group_s):.3g} s; {outcomes.filtered:.1%} were left out, {outcomes.quarantined:.1%} given up",
        f"{len(train_s):,} steps of {statistics.fmean(train_s):.3g} s beside waiting and publishing; publishing took "
        f"{publish_s:.3g} s, during {pause_s:.3g} s of which engines stood still",
        speed_basis,
    ]
    return Workload(
        Empirical(work),
        Empirical(train_s),
        _batch_size(records),
        speed,
        outcomes,
        publish_s - pause_s,
        pause_s,
        basis,
    )


def _train_seconds(records: Sequence[StepRecord]) -> list[float]:
    """From step to step, without waiting, publishing and evaluating; the first one, with its cold start, left out."""
    seconds: list[float] = []
    for before, record in pairwise(records):
        beside = sum(span.ended - span.began for span in record.spans if span.kind in ("wait", "publish", "evaluate"))
        seconds.append(max(1e-3, record.until - before.until - beside))
    return seconds


def _seconds(group: GroupSpan, publishes: Sequence[Span], paused_share: float) -> float:
    """Without the time that engines stood still."""
    overlaps = (min(span.ended, group.ended) - max(span.began, group.began) for span in publishes)
    return max(1e-3, group.ended - group.began - paused_share * sum(overlap for overlap in overlaps if overlap > 0))


def _speed(groups: Sequence[GroupSpan], seconds: Sequence[float], beside: Sequence[float]) -> tuple[Speed, str]:
    """How fast groups get on beside others, and what that rests on. beside: groups on the engine of each, itself too.

    Where the number of groups under way varied, tokens per second are compared between few and many. Beyond the most
    groups that were seen, engines are taken to be saturated: more of them bring nothing.
    """
    most = max(1, round(max(beside)))
    rated = sorted(
        (count, group.tokens / length)
        for count, group, length in zip(beside, groups, seconds, strict=True)
        if group.tokens > 0
    )
    if len(rated) >= 8 * _BINS and rated[-1][0] >= _SPREAD * rated[len(rated) // (2 * _BINS)][0]:
        bins = [rated[part * len(rated) // _BINS : (part + 1) * len(rated) // _BINS] for part in range(_BINS)]
        counts = [max(1.0, statistics.fmean(count for count, _ in found)) for found in bins]
        rates = [statistics.fmean(rate for _, rate in found) for found in bins]
        points = _plausible(counts, rates)
        last, at_last = points[-1]
        beyond = [(count, at_last * last / count) for count, _ in saturating(round(last)).points if count > last]
        return Speed([*points, *beyond]), (
            f"a group's speed with {points[0][0]:.3g} to {last:.3g} groups on its engine, as measured; "
            "beyond, engines are taken to be saturated"
        )
    return saturating(most), (
        f"a group is taken to be as fast as measured with up to {most} groups on its engine, the most there were; "
        "beyond, engines are taken to be saturated"
    )


def _plausible(counts: Sequence[float], rates: Sequence[float]) -> list[tuple[float, float]]:
    """Speeds relative to their mean that do not rise with the number of groups.

    Where measured ones rise, those next to each other are averaged: groups that outlast the others are slow, and end
    beside few, which says nothing about the engine.
    """
    pools: list[list[tuple[float, float]]] = []
    for point in zip(counts, rates, strict=True):
        pools.append([point])
        while len(pools) > 1 and _mean_rate(pools[-2]) < _mean_rate(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    mean = statistics.fmean(rates)
    points = {count: _mean_rate(pool) / mean for pool in pools for count, _ in pool}
    return sorted(points.items())


def _mean_rate(pool: Sequence[tuple[float, float]]) -> float:
    return statistics.fmean(rate for _, rate in pool)


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

    return [(area(group.ended) - area(group.began)) / (group.ended - group.began) for group in groups]


def _batch_size(records: Sequence[StepRecord]) -> int:
    return max((len(taken.draws) for record in records for taken in record.taken), default=1)


def _engines(config: Mapping[str, Any]) -> int:
    source = config.get("source")
    engine = source.get("engine") if isinstance(source, dict) else None
    engines = engine.get("engines", 1) if isinstance(engine, dict) else 1
    return engines if isinstance(engines, int) and engines > 0 else 1
