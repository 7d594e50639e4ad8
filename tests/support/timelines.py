"""A timeline as a run leaves it: the real scheduler and recorder on a clock that is moved by hand."""

from __future__ import annotations

import heapq
import random
from pathlib import Path

from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits, State
from spurline_async_rl.timeline.records import SpanKind, Timeline


def leave_timeline(
    path: Path, *, num_steps: int = 12, batch_size: int = 8, max_running: int = 6, max_staleness: int = 2, seed: int = 0
) -> None:
    """Write RUN_DIR/timeline.jsonl of a run whose steps take a second and whose groups take lognormal times."""
    made = _MadeUpRun(path, SchedulerLimits(max_staleness, batch_size, max_running, "window", 64, num_steps), seed)
    for step in range(1, num_steps + 1):
        made.step(step)


class _MadeUpRun:
    def __init__(self, path: Path, limits: SchedulerLimits, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.timeline = Timeline(path, lambda: self.now)
        self.scheduler = Scheduler(limits)
        self.ends: list[tuple[float, int]] = []
        self.versions: dict[int, int] = {}

    def step(self, step: int) -> None:
        self.timeline.began("wait")
        self.admit()
        while self.scheduler.next_batch() is None:
            self.advance(self.ends[0][0])
        self.timeline.ended("wait")
        self.timeline.taken(step, self.scheduler.take())
        self.admit()
        self.span("train", 0.85)
        self.span("publish", 0.15)
        self.scheduler.publish(step)
        self.admit()
        self.timeline.write(step)

    def span(self, kind: SpanKind, seconds: float) -> None:
        self.timeline.began(kind)
        self.advance(self.now + seconds)
        self.timeline.ended(kind)

    def advance(self, until: float) -> None:
        while self.ends and self.ends[0][0] <= until:
            self.now, draw = heapq.heappop(self.ends)
            version, newest = self.versions.pop(draw), self.scheduler.version
            if draw % 17 == 5:
                self.scheduler.end(draw, State.GIVEN_UP)
                self.timeline.group_ended(draw, "filtered", tokens=90, oldest=version, newest=newest)
            else:
                self.scheduler.end(draw, State.BUFFERED)
                self.timeline.group_ended(draw, "buffered", tokens=100, oldest=version, newest=newest)
            self.admit()
        self.now = until

    def admit(self) -> None:
        while self.scheduler.may_admit():
            draw = self.scheduler.draw()
            self.scheduler.admit(draw)
            self.timeline.group_began(draw, self.scheduler.version)
            self.versions[draw] = self.scheduler.version
            heapq.heappush(self.ends, (self.now + self.random.lognormvariate(-0.9, 0.8), draw))
