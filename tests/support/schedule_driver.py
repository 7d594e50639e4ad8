"""Run the scheduler and the ledger through a schedule as the source does, and hold every event against its promises.

The promises: the bound on staleness, progress, and that nothing is lost. A broken one is an AssertionError.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from schedules import FILTERED, KEPT, QUARANTINED, SKIPPED, UNREADABLE, Schedule

from spurline_async_rl.scheduling.ledger import Ledger, State
from spurline_async_rl.scheduling.scheduler import Scheduler

MAX_EVENTS = 20_000


@dataclass
class Ran:
    """batches: draws by 0-based batch. versions: oldest weights by draw. ages: batch number less that version.
    fillers: draws a batch filled up with. exhausted: whether a batch could not be filled."""

    batches: dict[int, list[int]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)
    fillers: set[int] = field(default_factory=set)
    exhausted: bool = False
    counts: dict[str, int] = field(default_factory=dict)


def run_schedule(schedule: Schedule, make_scheduler: Callable[..., Scheduler] = Scheduler) -> Ran:
    """What came of it. Raises AssertionError for a promise that was broken."""
    return _Driver(schedule, make_scheduler).run()


class _Driver:
    def __init__(self, schedule: Schedule, make_scheduler: Callable[..., Scheduler]) -> None:
        self.schedule = schedule
        self.make_scheduler = make_scheduler
        self.limits = schedule.limits
        self.ran = Ran()
        self.ledger = Ledger()
        self.scheduler = make_scheduler(self.limits)
        self.step = 0
        self.published = 0
        self.phase = "wait"
        self.again: list[int] = []
        self.running: list[int] = []
        self.counted = 0
        self.saved: dict[str, Any] | None = None

    def run(self) -> Ran:
        choices, kills = itertools.cycle(self.schedule.choices), [*self.schedule.kills]
        lived = 0
        for _ in range(MAX_EVENTS):
            lived += 1
            if kills and self.saved and lived > kills[0][0]:
                self._kill(kills.pop(0)[1])
                lived = 0
            self._check()
            if self.step == self.limits.num_batches or self.ran.exhausted:
                return self._finished()
            possible = self._possible()
            assert possible, f"deadlock: {self.scheduler}"
            possible[next(choices) % len(possible)]()
        raise AssertionError(f"no end: {self.scheduler}")

    def _possible(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        if self.phase == "train":
            events.append(self._end_training)
        elif self.phase == "publish":
            events.append(self._end_publish)
        elif self.scheduler.next_batch() is not None:
            events.append(self._take)
        elif self.scheduler.is_exhausted():
            events.append(self._give_up)
        if self.scheduler.may_admit():
            events.append(self._start)
        events += [lambda draw=draw: self._end(draw) for draw in self.running]
        return events

    def _start(self) -> None:
        draw = self.again.pop(0) if self.again else self.ledger.draw()
        if self.schedule.outcome(draw) == UNREADABLE:
            self.scheduler.pass_over(draw)
            self.ledger.move(draw, State.SKIPPED)
            return
        self.scheduler.admit(draw)
        self.ledger.move(draw, State.RUNNING)
        self.running.append(draw)
        # The worst case: something was generated before anything else happened.
        self.ran.versions[draw] = self.published

    def _end(self, draw: int) -> None:
        outcome = self.schedule.outcome(draw)
        self.running.remove(draw)
        self.counted += outcome != SKIPPED
        if outcome == KEPT:
            self.scheduler.finish(draw)
            self.ledger.move(draw, State.BUFFERED)
            return
        self.scheduler.leave_out(draw, counts=outcome != SKIPPED, can_fill=outcome == FILTERED)
        states = {FILTERED: State.FILTERED, QUARANTINED: State.QUARANTINED, SKIPPED: State.SKIPPED}
        self.ledger.move(draw, states[outcome])

    def _take(self) -> None:
        batch, fillers = self.step, set(self.scheduler.fillers)
        tried = self.counted
        draws = self.scheduler.take()
        fillers &= set(draws)
        self.counted = self.scheduler.num_buffered
        if fillers:
            assert tried >= self.limits.draw_limit, f"filled up after {tried} draws: {draws}"
            assert not self.running, f"filled up while {self.running} run"
        assert len(draws) == len(set(draws)) == self.limits.batch_size, f"batch {batch}: {draws}"
        assert draws == sorted(draws), f"batch {batch}: {draws}"
        for draw in draws:
            self.ledger.train(draw, batch + 1)
            age = self.ran.ages[draw] = batch - self.ran.versions[draw]
            if self.limits.at_bound == "wait":
                assert age <= self.limits.max_staleness, f"draw {draw} of batch {batch} is {age} updates old"
        if self.limits.order == "fifo":
            earlier = [draw for other in range(batch) for draw in self.ran.batches[other]]
            assert not earlier or max(earlier) < draws[0], f"batch {batch}: {draws} after {max(earlier)}"
        self.ran.batches[batch] = draws
        self.ran.fillers |= fillers
        self.phase = "train"

    def _end_training(self) -> None:
        self.phase = "publish"
        if (self.step + 1) % self.schedule.publish_every:
            self._end_step()

    def _end_publish(self) -> None:
        self.published = self.step + 1
        self.scheduler.publish(self.published)
        self._end_step()

    def _end_step(self) -> None:
        self.step += 1
        self.phase = "wait"
        finished = [group for group in self.scheduler.untrained if group.finished]
        self.saved = {
            "step": self.step,
            "ledger": self.ledger.state_dict(),
            "buffered": [(group.draw, group.version) for group in finished],
            "fillers": list(self.scheduler.fillers),
            "left_out": self.scheduler.num_left_out,
            "versions": dict(self.ran.versions),
            "counted": self.counted,
        }

    def _kill(self, places: int) -> None:
        """The run ends at once, and goes on from its newest checkpoint, with weights of that step."""
        saved = self.saved
        assert saved is not None
        self.limits = replace(self.limits, max_running=places)
        self.step = self.published = saved["step"]
        self.phase = "wait"
        self.ledger = Ledger()
        self.ledger.load_state_dict(saved["ledger"])
        self.again = self.ledger.in_state(State.PENDING)
        self.scheduler = self.make_scheduler(self.limits, version=self.step, taken=self.step)
        self.scheduler.restore(saved["buffered"], saved["fillers"], saved["left_out"], pending=self.again)
        self.running, self.counted = [], saved["counted"]
        self.ran.versions = dict(saved["versions"])
        trained = set(self.ledger.trained())
        self.ran.batches = {batch: draws for batch, draws in self.ran.batches.items() if batch < self.step}
        self.ran.ages = {draw: age for draw, age in self.ran.ages.items() if draw in trained}
        self.ran.fillers &= trained

    def _give_up(self) -> None:
        assert self.counted >= self.limits.draw_limit, f"gave up after {self.counted} draws: {self.scheduler}"
        self.ran.exhausted = True

    def _check(self) -> None:
        self.ledger.check(running=len(self.running), buffered=self.scheduler.num_buffered)
        assert len(self.running) == self.scheduler.num_running <= self.limits.max_running, f"{self.running} run"

    def _finished(self) -> Ran:
        """Everything that was drawn has come to an end, and every batch is whole."""
        counts = self.ran.counts = self.ledger.counts()
        if self.ran.exhausted:
            return self.ran
        assert counts["running"] == counts["buffered"] == counts["pending"] == 0, counts
        assert counts["trained"] == self.limits.num_batches * self.limits.batch_size, counts
        for draw, step in self.ledger.trained().items():
            assert draw in self.ran.batches[step - 1], (draw, step)
        for state in (State.FILTERED, State.QUARANTINED, State.SKIPPED):
            for draw in self.ledger.in_state(state):
                assert self.schedule.outcome(draw) != KEPT, f"draw {draw} was good and is {state.name}"
        return self.ran
