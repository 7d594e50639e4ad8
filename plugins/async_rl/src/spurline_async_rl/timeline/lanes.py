"""Choose what of a timeline is drawn, and in which lane each group lies. Pure; see `figure.py` for the drawing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from spurline_async_rl.timeline.records import GroupSpan, StepRecord

_MAX_GROUPS = 1500
"""More bars are neither readable nor quick to draw."""
MAX_LANES = 128


@dataclass(frozen=True)
class Window:
    """Steps `first` to `last`, which took from `began` to `ended`."""

    first: int
    last: int
    began: float
    ended: float


def window_ending_at(records: Sequence[StepRecord], last_index: int, num_steps: int) -> Window:
    """Up to so many steps, the last of them at this place in `records`; fewer where they hold too many groups."""
    first, groups = last_index, len(records[last_index].groups)
    while first > 0 and last_index - first + 1 < num_steps:
        groups += len(records[first - 1].groups)
        if groups > _MAX_GROUPS:
            break
        first -= 1
    began = records[first - 1].until if first > 0 else 0.0
    return Window(records[first].step, records[last_index].step, began, records[last_index].until)


def slowest_window(records: Sequence[StepRecord], num_steps: int) -> Window:
    """Around the step that waited longest for its batch; the first step, which has nothing to take yet, aside."""
    waited = [sum(span.ended - span.began for span in record.spans if span.kind == "wait") for record in records]
    slowest = max(range(1, len(records)), key=waited.__getitem__) if len(records) > 1 else 0
    return window_ending_at(records, min(len(records) - 1, slowest + num_steps // 3), num_steps)


@dataclass(frozen=True)
class LaneSpan:
    """A group and the lane it is drawn in, from 0 at the bottom."""

    lane: int
    group: GroupSpan


def lanes_of(records: Sequence[StepRecord], window: Window) -> list[LaneSpan]:
    """The groups within the window, each in the lowest lane that is free when it begins."""
    groups = sorted(
        (
            group
            for record in records
            for group in record.groups
            if group.ended > window.began and group.began < window.ended
        ),
        key=lambda group: (group.began, group.draw),
    )
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    num_lanes = 0
    spans: list[LaneSpan] = []
    for group in groups:
        while busy and busy[0][0] <= group.began:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        heapq.heappush(busy, (group.ended, lane))
        spans.append(LaneSpan(lane, group))
    return spans
