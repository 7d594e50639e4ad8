"""Where a Workload comes from: what an earlier run measured, and what the options of `spurline simulate` say.

In: the timeline and metrics of a run, and the options, which win. Out: a Workload that says what it rests on. What a
run tells of its engines is how fast groups got on with as many beside them as there were; see `_speed`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from spurline.errors import UserError
from spurline.report.record import read_record
from spurline_async_rl.simulation.prediction import Knobs
from spurline_async_rl.simulation.workload import Speed, Times, Workload, saturating
from spurline_async_rl.timeline.records import TIMELINE_FILE, GroupSpan, read_timeline


def given_workload(
    knobs: Knobs,
    origin: str,
    *,
    from_run: Path | None,
    group_seconds: float | None,
    sigma: float,
    stragglers: str | None,
    saturation: int | None,
    step_seconds: float | None,
    publish_seconds: float | None,
    pause_seconds: float | None,
    left_out: float | None,
) -> Workload:
    """The options are those of the command. Raises UserError when they do not suffice, or cannot be."""
    if from_run is not None:
        workload = measured_workload(from_run)
    elif group_seconds is None or step_seconds is None:
        needed = {"--group-seconds": group_seconds, "--step-seconds": step_seconds}
        missing = " and ".join(option for option, value in needed.items() if value is None)
        raise UserError(
            f"{origin}: how long things take is not known: {missing} missing. Give --from RUN_DIR, an "
            "earlier run of source async_rollouts that measured it, or --group-seconds, the time of one group with "
            "all its attempts, and --step-seconds, the time of one update."
        )
    else:
        workload = Workload(Times([group_seconds]), Times([step_seconds]), knobs.batch_size)
    basis = list(workload.basis)
    workload = _with_groups(workload, knobs, group_seconds, sigma, stragglers, saturation, basis)
    if step_seconds is not None:
        basis.append(f"{step_seconds:g} s for a step of {knobs.batch_size} groups, as given")
        workload = replace(workload, train_s=Times([step_seconds]), batch_size=knobs.batch_size)
    if left_out is not None:
        if not 0 <= left_out < 1:
            raise UserError(f"--left-out {left_out:g}: a share is needed, at least 0 and less than 1.")
        basis.append(f"{left_out:.1%} of the groups are left out for equal rewards, as given")
        workload = replace(workload, filtered=left_out)
    if publish_seconds is not None or pause_seconds is not None:
        whole = publish_seconds if publish_seconds is not None else workload.transfer_s + workload.pause_s
        still = pause_seconds if pause_seconds is not None else whole
        if still > whole:
            raise UserError(
                f"--pause-seconds {still:g}: engines cannot stand still longer than the {whole:g} s that a publish "
                "takes. Raise --publish-seconds."
            )
        basis.append(f"{whole:g} s for a publish, engines standing still for {still:g} s of it, as given")
        workload = replace(workload, transfer_s=whole - still, pause_s=still)
    elif from_run is None:
        basis.append("publishing weights takes no time")
    return replace(workload, basis=basis)


def _with_groups(
    workload: Workload,
    knobs: Knobs,
    group_seconds: float | None,
    sigma: float,
    stragglers: str | None,
    saturation: int | None,
    basis: list[str],
) -> Workload:
    """The groups and engines that these options say; `basis` gets a line for each."""
    if group_seconds is not None:
        basis.append(f"{group_seconds:g} s for a group, lognormal with sigma {sigma:g}, as given")
        workload = replace(workload, group_s=Times([group_seconds], sigma))
    elif sigma:
        raise UserError("--sigma says how far --group-seconds spread, which is not given. Give both, or neither.")
    if stragglers is not None:
        share, factor = parse_stragglers(stragglers)
        basis.append(f"{share:.2%} of the groups take {factor:g} times as long, as given")
        assert isinstance(workload.group_s, Times), workload
        workload = replace(workload, group_s=replace(workload.group_s, late_share=share, late_factor=factor))
    if saturation is None and group_seconds is None:
        return workload
    why = "as given" if saturation is not None else "as many as the config runs"
    groups = saturation or max(1, -(-knobs.max_running // knobs.engines))
    basis.append(
        f"engines are saturated by {groups} groups each ({why}): fewer are no faster, more share what these do"
    )
    return replace(workload, speed=saturating(groups))


def parse_stragglers(text: str) -> tuple[float, float]:
    """Share and factor of `0.01x10`. Raises UserError."""
    number = r"(\d+\.?\d*|\.\d+)"
    if match := re.fullmatch(rf"\s*{number}\s*(%?)\s*x\s*{number}\s*", text):
        share, factor = float(match[1]) / (100 if match[2] else 1), float(match[3])
        if share <= 1 and factor > 0:
            return share, factor
    raise UserError(
        f"--stragglers {text}: expected SHARExFACTOR, such as 0.01x10: one group in a hundred takes ten times as long."
    )


_FEWEST_GROUPS = 8
_BINS = 4
_SPREAD = 1.5
"""How much the most groups under way have to exceed the fewest before their speeds say anything."""


def measured_workload(run_dir: Path) -> Workload:
    """Raises UserError when the run left too little to go by."""
    run = read_record(run_dir)
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
    _, pauses = run.series("time/sync_pause")
    pause_s = min(publish_s, fmean(pauses)) if pauses else publish_s
    paused_share = pause_s / publish_s if publish_s else 0.0

    def generating_s(group: GroupSpan) -> float:
        """Without the time that engines stood still."""
        overlaps = (min(span.ended, group.ended) - max(span.began, group.began) for span in publishes)
        return max(1e-3, group.seconds - paused_share * sum(overlap for overlap in overlaps if overlap > 0))

    group_s = [generating_s(group) for group in groups]
    source: dict[str, Any] = run.config.get("source") or {}
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
    return Workload(
        Times(work), Times(train_s), batch_size, speed, filtered, quarantined, publish_s - pause_s, pause_s, basis
    )


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
