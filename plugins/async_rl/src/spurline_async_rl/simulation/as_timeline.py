"""A simulated run as the records that a real one leaves: the same picture and the same metrics for both.

In: SimulatedRun. Out: StepRecords, and lines of metrics with the names of source `async_rollouts`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import cast

from spurline_async_rl.simulation.records import GroupRecord, SimulatedRun
from spurline_async_rl.simulation.records import Span as PhaseSpan
from spurline_async_rl.timeline.records import GroupSpan, GroupState, Level, Span, StepRecord, Taken


def timeline_of(run: SimulatedRun) -> list[StepRecord]:
    """One record for each step that ended; groups still under way at the end are not in it."""
    steps = sorted({span.step for span in run.spans})
    ends = {step: max(span.end for span in run.spans if span.step == step) for step in steps}
    untils = [ends[step] for step in steps]
    groups: list[list[GroupSpan]] = [[] for _ in steps]
    levels: list[list[Level]] = [[] for _ in steps]
    for group in sorted(run.groups, key=lambda group: group.draw):
        if group.end is not None and group.end <= untils[-1]:
            groups[bisect_left(untils, group.end)].append(_group_span(group, group.end))
    for level in run.levels:
        if level.time <= untils[-1]:
            levels[bisect_left(untils, level.time)].append(Level(level.time, level.running, level.buffered))
    batches = run.batches()
    records: list[StepRecord] = []
    for place, step in enumerate(steps):
        spans = [span for span in run.spans if span.step == step]
        taken_at = next((span.begin for span in spans if span.phase == "train"), untils[place])
        taken = Taken(step, taken_at, tuple(batches.get(step, ())))
        records.append(
            StepRecord(step, untils[place], tuple(groups[place]), _spans(spans), tuple(levels[place]), (taken,))
        )
    return records


def metrics_of(run: SimulatedRun) -> list[dict[str, float]]:
    """One line for each step, as in metrics.jsonl; the work of a group stands for its tokens."""
    lines: list[dict[str, float]] = []
    by_step: dict[int, list[GroupRecord]] = {}
    for group in run.groups:
        if group.step is not None:
            by_step.setdefault(group.step, []).append(group)
    for record in timeline_of(run):
        ages: dict[int, float] = {}
        for group in by_step.get(record.step, ()):
            for age, work in group.ages().items():
                ages[age] = ages.get(age, 0.0) + work
        total = sum(ages.values()) or 1.0
        seconds = {span.kind: span.ended - span.began for span in record.spans}
        line: dict[str, float] = {
            "step": record.step,
            "time/step": sum(length for kind, length in seconds.items() if kind != "pause"),
            "time/wait_rollouts": seconds.get("wait", 0.0),
            "time/sync": seconds.get("publish", 0.0),
            "time/sync_pause": seconds.get("pause", 0.0),
            "staleness/mean": sum(age * work for age, work in ages.items()) / total,
            "staleness/max": max(ages, default=0),
        }
        if record.levels:
            line |= {"async/running": record.levels[-1].running, "async/buffered": record.levels[-1].buffered}
        lines.append(line | {f"staleness/tokens_{age}": work for age, work in sorted(ages.items())})
    return lines


def _group_span(group: GroupRecord, end: float) -> GroupSpan:
    state = cast("GroupState", "buffered" if group.state == "trained" else group.state)
    versions = group.parts or {group.version: 0.0}
    return GroupSpan(group.draw, group.begin, end, group.version, state, 0, min(versions), max(versions))


def _spans(spans: Sequence[PhaseSpan]) -> tuple[Span, ...]:
    """A publish goes from the first tensor on its way to the moment that engines go on."""
    found = [Span(span.phase, span.begin, span.end) for span in spans if span.phase in ("wait", "train", "pause")]
    publishing = [span for span in spans if span.phase in ("transfer", "pause")]
    if publishing:
        begin, end = min(span.begin for span in publishing), max(span.end for span in publishing)
        found.append(Span("publish", begin, end))
    return tuple(found)
