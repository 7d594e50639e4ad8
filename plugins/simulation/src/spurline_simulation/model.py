"""Simulate a whole asynchronous run on a virtual clock.

The model uses the real scheduler. Its engines and its trainer do no work; they only take time. An event is the end of a
group or of a phase of the trainer. After each event, every group that may start is started, and a waiting trainer takes
the next batch if the batch is ready. Equal input gives the same run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, Self

from spurline.errors import RunFailedError
from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits
from spurline_async_rl.timeline.records import STATE_NAMES, GroupSpan, Span, SpanKind, StepRecord, Taken
from spurline_simulation.workload import Fate, Workload

_STATES = {name: state for state, name in STATE_NAMES.items()}
_Phase = Literal["wait", "train", "transfer", "pause"]
"""A phase of the trainer. A publish has two: `transfer`, in which engines still generate, and then `pause`."""


@dataclass
class _Running:
    """A running group, admitted at `began` with weights of `version`.

    `done` is the value of `Model._done` when the work of this group was last added to `Model.work`.
    """

    fate: Fate
    began: float
    version: int
    done: float


class Model:
    """One simulated run of source `async_rollouts`.

    All running groups share the engines equally and progress at the same speed. So the model keeps only one counter:
    the work of an imaginary group that has been running since the beginning. The work of a real group is the increase
    of this counter (`_done`) while the group runs.

    Attributes:
        records: The timeline of the run.
        work: For each draw, in the order of admission, the work of its group with each version of the weights.
        depths: The depth D (see depth.py) after each batch was taken.
        busy_s: For each record, the sum of the running times of all groups until its end, without pauses.
    """

    def __init__(self, workload: Workload, limits: SchedulerLimits, engines: int = 1, publish_every: int = 1) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.step = 0
        self.now = 0.0
        self.work: dict[int, dict[int, float]] = {}
        self._workload = workload
        self._publish_every = publish_every
        self._engines = engines
        self._done = 0.0
        # A heap of the running groups: the value of `_done` at which each ends, and its draw.
        self._ends: list[tuple[float, int]] = []
        self._busy_s = 0.0
        self.records: list[StepRecord] = []
        self.depths: list[float] = []
        self.busy_s: list[float] = []
        self._running: dict[int, _Running] = {}
        self._phase: _Phase = "wait"
        self._began: dict[_Phase, float] = {"wait": 0.0}
        self._phase_end = math.inf
        self._taken_at = 0.0
        self._groups: list[GroupSpan] = []
        self._spans: list[Span] = []
        self._taken: dict[int, Taken] = {}
        self._proceed()

    def finish(self) -> Self:
        """Simulate until the last step ends."""
        while self.advance():
            pass
        return self

    def advance(self) -> bool:
        """Simulate until the next event. Return False if the last step is over.

        Raises:
            RunFailedError: If a batch cannot be filled.
        """
        if self.step == self.limits.num_batches:
            self.close_record()
            return False
        speed = 0.0
        if self._ends and self._phase != "pause":
            speed = self._workload.speed(len(self._ends), self._engines)
        group_s = (self._ends[0][0] - self._done) / speed if speed else math.inf
        trainer_s = max(0.0, self._phase_end - self.now)
        assert min(group_s, trainer_s) < math.inf, f"deadlock after {self.now:g} s: {self.scheduler}"
        if min(group_s, trainer_s) > 0:
            # A record includes everything that ends at the same time as its step.
            self.close_record()
        if speed:
            # Without `min`, rounding could skip the end of the next group.
            self._done = min(self._done + min(group_s, trainer_s) * speed, self._ends[0][0])
        if self._phase != "pause":
            self._busy_s += min(group_s, trainer_s) * self.scheduler.num_running
        if group_s <= trainer_s:
            self.now += group_s
            self._done, draw = heappop(self._ends)
            self._end_group(draw)
        else:
            self.now = self._phase_end
            self._end_phase()
        self._proceed()
        return True

    def close_record(self) -> None:
        """Append the record of the step that has ended. Do nothing if it is written already or no step has ended."""
        if self.step in self._taken:
            taken = self._taken.pop(self.step)
            self.records.append(StepRecord(self.step, self.now, tuple(self._groups), tuple(self._spans), (taken,)))
            self.busy_s.append(self._busy_s)
            self._groups, self._spans = [], []

    def _proceed(self) -> None:
        """Start groups and take the next batch, if possible."""
        self._admit()
        if self._phase == "wait" and self.step < self.limits.num_batches:
            if self.scheduler.next_batch() is not None:
                waited, since = self.now - self._began["wait"], self.now - self._taken_at
                self._taken[self.step + 1] = Taken(self.step + 1, self.now, tuple(self.scheduler.take(waited, since)))
                self._taken_at = self.now
                self.depths.append(self.scheduler.depth.value)
                self._begin("train", self._workload.step_s(self.step + 1, self.limits.batch_size))
                self._admit()
            elif self.scheduler.is_exhausted():
                raise RunFailedError(f"Step {self.step + 1} cannot be filled: {self.scheduler}")
            else:
                self.scheduler.await_batch()
                self._admit()

    def _admit(self) -> None:
        while self.scheduler.may_admit():
            draw = self.scheduler.draw()
            fate = self._workload.fate(draw)
            if fate.outcome == "unreadable":
                self.scheduler.skip(draw)
                continue
            self.scheduler.admit(draw)
            self.work[draw] = {}
            heappush(self._ends, (self._done + fate.work, draw))
            self._running[draw] = _Running(fate, self.now, self.scheduler.version, self._done)

    def _end_group(self, draw: int) -> None:
        self._note_work(draw)
        group, work = self._running.pop(draw), self.work[draw]
        outcome = group.fate.outcome
        assert outcome != "unreadable", draw
        if not work:
            work[self.scheduler.version] = 0.0
        self._groups.append(GroupSpan(draw, group.began, self.now, group.version, outcome, 0, min(work), max(work)))
        self.scheduler.end(draw, _STATES[outcome])

    def _note_work(self, draw: int) -> None:
        """Note the work that this group has done since the last call, all with the current version of the weights."""
        group, work, version = self._running[draw], self.work[draw], self.scheduler.version
        if self._done > group.done:
            work[version] = work.get(version, 0.0) + self._done - group.done
        group.done = self._done

    def _begin(self, phase: _Phase, seconds: float) -> None:
        """Begin the trainer's next phase. `wait` has no fixed length. It ends when a batch is ready."""
        if self._phase == "pause":
            self._note_span("publish", self._began["transfer"])
        elif self._phase != "transfer":
            self._note_span(self._phase, self._began[self._phase])
        self._phase, self._began[phase], self._phase_end = phase, self.now, self.now + seconds

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
            self.close_record()
            self.step += 1
