"""A whole run on a virtual clock: the real scheduler, with engines and trainer made of times.

Place on the way: Workload, limits -> this -> the records that a real run would leave, and what each group got done. An
event is the end of a group or of what the trainer does; after each, every group that may start does, and the trainer
takes the next batch if it waits for one. Nothing is random and no time passes: equal input gives the same run, in
milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Literal

from spurline.errors import RunFailedError
from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits
from spurline_async_rl.simulation.workload import Fate, Speed, Workload
from spurline_async_rl.timeline.records import (
    STATE_NAMES,
    GroupSpan,
    Level,
    Span,
    SpanKind,
    StepRecord,
    Taken,
    trained_steps,
)

_STATES = {name: state for state, name in STATE_NAMES.items()}
_Phase = Literal["wait", "train", "transfer", "pause"]
"""Phase of the trainer. transfer: weights travel while engines generate; pause: engines stand still."""


@dataclass(frozen=True)
class SimulatedRun:
    """The record of a run.

    records: of each step, as a real run leaves them. work: by draw, in the order of admission, the work that each group
    got done with each version of the weights, in the attempt that counts. depths: by step, the depth of admission after
    its batch was taken.
    """

    records: Sequence[StepRecord]
    work: Mapping[int, Mapping[int, float]]
    limits: SchedulerLimits
    depths: Mapping[int, float]

    @property
    def seconds(self) -> float:
        return self.records[-1].until if self.records else 0.0


class Engines:
    """Groups go to the engine with the fewest. None gets on while they are paused.

    All groups of an engine get on equally fast, so one number for each engine, the work `done` by each of its groups
    since the beginning, says when which of them ends. What a group got done is a difference of it.
    """

    def __init__(self, count: int, speed: Speed) -> None:
        self.done = [0.0] * count
        self.paused = False
        self._ends: list[list[tuple[float, int]]] = [[] for _ in range(count)]
        self._speed = speed

    def start(self, draw: int, work: float) -> int:
        """A group begins; the number of its engine."""
        number = min(range(len(self._ends)), key=lambda number: len(self._ends[number]))
        heappush(self._ends[number], (self.done[number] + work, draw))
        return number

    def until_end(self) -> float:
        """Seconds until the next group ends; infinite when none gets on."""
        return min(map(self._seconds, range(len(self._ends))))

    def advance(self, seconds: float) -> None:
        """Time passes during which no group ends."""
        for number, ends in enumerate(self._ends):
            if ends and not self.paused:
                # Rounding must not carry an engine beyond the end of its next group.
                self.done[number] = min(self.done[number] + seconds * self._speed.at(len(ends)), ends[0][0])

    def end_next(self) -> int:
        """The draw of the next group to end, which has been advanced to and is over now."""
        number = min(range(len(self._ends)), key=self._seconds)
        self.done[number], draw = heappop(self._ends[number])
        return draw

    def _seconds(self, number: int) -> float:
        ends = self._ends[number]
        if self.paused or not ends:
            return math.inf
        return (ends[0][0] - self.done[number]) / self._speed.at(len(ends))


@dataclass
class _Running:
    """A group under way. began, version: when it was admitted. retries: that are still to come. engine: the one that
    runs it; done: by each group of that one when this one's work was noted last."""

    fate: Fate
    began: float
    version: int
    retries: int
    engine: int = 0
    done: float = 0.0


class Model:
    """One run of source `async_rollouts`; may be stopped after any event.

    publish_every: steps from one publish of the weights to the next. scheduler, work: of a run that is resumed; its
    groups under way are lost.
    """

    def __init__(
        self,
        workload: Workload,
        limits: SchedulerLimits,
        engines: int = 1,
        publish_every: int = 1,
        *,
        scheduler: Scheduler | None = None,
        work: Mapping[int, Mapping[int, float]] | None = None,
    ) -> None:
        self.limits = limits
        self.scheduler = scheduler or Scheduler(limits)
        self.step = self.scheduler.taken
        self.now = 0.0
        self.work = {draw: dict(parts) for draw, parts in (work or {}).items()}
        self._workload = workload
        self._publish_every = publish_every
        self._engines = Engines(engines, workload.speed)
        self._running: dict[int, _Running] = {}
        self._phase: _Phase = "wait"
        self._began: dict[_Phase, float] = {"wait": 0.0}
        self._phase_end = math.inf
        self._taken_at = 0.0
        self._groups: list[GroupSpan] = []
        self._spans: list[Span] = []
        self._levels: list[Level] = []
        self._taken: dict[int, Taken] = {}
        self._depths: dict[int, float] = {}
        self._records: list[StepRecord] = []
        self._proceed()

    def finish(self) -> SimulatedRun:
        """Go on to the end of the last step. Raises as `advance` does."""
        while self.advance():
            pass
        return self.result()

    def advance(self) -> bool:
        """Let time pass until the next event, and let that happen. False once the last step is over.

        Raises AssertionError when nothing would ever happen, RunFailedError when a batch cannot be filled.
        """
        if self.is_over():
            return False
        group_s, trainer_s = self._engines.until_end(), max(0.0, self._phase_end - self.now)
        assert min(group_s, trainer_s) < math.inf, f"deadlock after {self.now:g} s: {self.scheduler}"
        if min(group_s, trainer_s) > 0:
            # What ends at the same time as a step is in its record, whichever comes first.
            self._record_step()
        self._engines.advance(min(group_s, trainer_s))
        if group_s <= trainer_s:
            self.now += group_s
            self._end_attempt(self._engines.end_next())
        else:
            self.now = self._phase_end
            self._end_phase()
        self._proceed()
        return True

    def is_over(self) -> bool:
        """Return whether the last step has been trained and published."""
        return self.step == self.limits.num_batches

    def result(self, after: int = 0) -> SimulatedRun:
        """The steps that have ended so far but the first ones, `after` in number, at whose end time begins."""
        self._record_step()
        before, records = self._records[:after], self._records[after:]
        if before:
            zero, trained = before[-1].until, trained_steps(records)
            earlier = [group for record in before for group in record.groups if group.draw in trained]
            level = replace(before[-1].levels[-1], at=zero)
            first = replace(records[0], groups=(*earlier, *records[0].groups), levels=(level, *records[0].levels))
            records = [_moved(record, -zero) for record in (first, *records[1:])]
        depths = {record.step: self._depths[record.step] for record in records}
        return SimulatedRun(records, self.work, self.limits, depths)

    def _record_step(self) -> None:
        """Close the record of the step that has ended, if one has."""
        if self.step in self._taken:
            taken = self._taken.pop(self.step)
            groups, spans, levels = tuple(self._groups), tuple(self._spans), tuple(self._levels)
            self._records.append(StepRecord(self.step, self.now, groups, spans, levels, (taken,)))
            self._groups, self._spans, self._levels = [], [], []

    def _proceed(self) -> None:
        """Everything that takes no time."""
        self._admit()
        if self._phase == "wait" and not self.is_over():
            if self.scheduler.next_batch() is not None:
                waited, since = self.now - self._began["wait"], self.now - self._taken_at
                self._taken[self.step + 1] = Taken(self.step + 1, self.now, tuple(self.scheduler.take(waited, since)))
                self._taken_at, self._depths[self.step + 1] = self.now, self.scheduler.depth.value
                self._begin("train", self._workload.step_s(self.step + 1, self.limits.batch_size))
                self._admit()
            elif self.scheduler.is_exhausted():
                raise RunFailedError(f"Step {self.step + 1} cannot be filled: {self.scheduler}")
            else:
                self.scheduler.await_batch()
                self._admit()
        if self._levels and self._levels[-1].at == self.now:
            self._levels.pop()
        self._levels.append(Level(self.now, self.scheduler.num_running, self.scheduler.num_buffered))

    def _admit(self) -> None:
        while self.scheduler.may_admit():
            draw = self.scheduler.draw()
            fate = self._workload.fate(draw)
            if fate.outcome == "unreadable":
                self.scheduler.skip(draw)
                continue
            self.scheduler.admit(draw)
            self.work[draw] = {}
            self._running[draw] = _Running(fate, self.now, self.scheduler.version, fate.retries)
            self._start_attempt(draw)

    def _start_attempt(self, draw: int) -> None:
        group = self._running[draw]
        group.engine = self._engines.start(draw, group.fate.work)
        group.done = self._engines.done[group.engine]

    def _end_attempt(self, draw: int) -> None:
        self._note_work(draw)
        group, work, outcome = self._running[draw], self.work[draw], self._running[draw].fate.outcome
        if group.retries > 0:
            group.retries -= 1
            work.clear()
            self._start_attempt(draw)
            return
        assert outcome != "unreadable", draw
        del self._running[draw]
        if not work:
            work[self.scheduler.version] = 0.0
        self._groups.append(GroupSpan(draw, group.began, self.now, group.version, outcome, 0, min(work), max(work)))
        self.scheduler.end(draw, _STATES[outcome])

    def _note_work(self, draw: int) -> None:
        """Count what this group got done since the last call as work with the weights that are published now."""
        group, work, version = self._running[draw], self.work[draw], self.scheduler.version
        done = self._engines.done[group.engine]
        if done > group.done:
            work[version] = work.get(version, 0.0) + done - group.done
        group.done = done

    def _begin(self, phase: _Phase, seconds: float) -> None:
        """The trainer's next phase; `wait` ends when a batch is there."""
        if self._phase != "transfer":
            self._note_span(self._phase, self._began[self._phase])
        if self._phase == "pause":
            self._note_span("publish", self._began["transfer"])
        self._phase, self._began[phase], self._phase_end = phase, self.now, self.now + seconds
        self._engines.paused = phase == "pause"

    def _note_span(self, kind: SpanKind, began: float) -> None:
        if self.now > began:
            self._spans.append(Span(kind, began, self.now))

    def _end_phase(self) -> None:
        if self._phase == "train" and (self.step + 1) % self._publish_every == 0:
            self._begin("transfer", self._workload.transfer_s)
        elif self._phase == "transfer":
            self._begin("pause", self._workload.pause_s)
        else:
            if self._phase == "pause":
                for draw in self._running:
                    self._note_work(draw)
                self.scheduler.publish(self.step + 1)
            self._begin("wait", math.inf)
            self.end_step()

    def end_step(self) -> None:
        """The step is over, and no batch has been taken for the next one: now is when a run makes its checkpoint."""
        self._record_step()
        self.step += 1


def _moved(record: StepRecord, by_s: float) -> StepRecord:
    """Return the record with all times so much later."""
    return StepRecord(
        record.step,
        record.until + by_s,
        tuple(replace(group, began=group.began + by_s, ended=group.ended + by_s) for group in record.groups),
        tuple(replace(span, began=span.began + by_s, ended=span.ended + by_s) for span in record.spans),
        tuple(replace(level, at=level.at + by_s) for level in record.levels),
        tuple(replace(taken, at=taken.at + by_s) for taken in record.taken),
    )
