"""The scheduler under everything that may happen: the bound holds, nothing waits for ever, and nothing is lost."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from schedule_driver import run_schedule
from schedules import KEPT, Schedule, random_schedule, schedules

from spurline_async_rl.scheduling.limits import SchedulerLimits
from spurline_async_rl.scheduling.scheduler import Scheduler, Untrained

SOAK = bool(os.environ.get("SPURLINE_SOAK"))


@pytest.mark.slow
@settings(max_examples=10_000 if SOAK else 200)
@given(schedules())
def test_the_bound_holds_and_every_prompt_is_trained_or_left_out_for_a_reason_whatever_happens_when(schedule: Schedule):
    run_schedule(schedule)


@pytest.mark.slow
def test_the_bound_holds_in_schedules_made_of_stragglers_and_restarts():
    for seed in range(50_000 if SOAK else 1_500):
        run_schedule(random_schedule(seed))


class AdmitsOneTooMany(Scheduler):
    def may_admit(self) -> bool:
        limits = self.limits
        room = limits.most_untrained(self.version, self.taken) + 1
        return self.num_running < limits.max_running and len(self.untrained) < room


class AdmitsForOneBatchTooMany(Scheduler):
    """Counts staleness from the batch that is trained, and forgets that this one was taken."""

    def may_admit(self) -> bool:
        limits = self.limits
        room = limits.most_untrained(self.version + 1, self.taken)
        return self.num_running < limits.max_running and len(self.untrained) < room


class AdmitsBeyondTheEnd(Scheduler):
    def may_admit(self) -> bool:
        limits = self.limits
        room = (self.version + limits.max_staleness - self.taken + 1) * limits.batch_size
        return self.num_running < limits.max_running and len(self.untrained) < room


class RunsOneTooMany(Scheduler):
    def may_admit(self) -> bool:
        limits = self.limits
        room = limits.most_untrained(self.version, self.taken)
        return self.num_running <= limits.max_running and len(self.untrained) < room


class OvertakesWithoutLookingAtDeadlines(Scheduler):
    def _keeps_deadlines(self, chosen: set[int]) -> bool:
        return True


class SeesDeadlinesOneBatchLate(Scheduler):
    def _keeps_deadlines(self, chosen: set[int]) -> bool:
        self.taken -= 1
        try:
            return super()._keeps_deadlines(chosen)
        finally:
            self.taken += 1


class SeesDeadlinesOneBatchEarly(Scheduler):
    def _keeps_deadlines(self, chosen: set[int]) -> bool:
        self.taken += 1
        try:
            return super()._keeps_deadlines(chosen)
        finally:
            self.taken -= 1


class TakesTheNewestFirst(Scheduler):
    def _candidates(self) -> list[Untrained]:
        return sorted(super()._candidates(), key=lambda group: (-group.version, group.draw))


class TakesWhateverIsFinished(Scheduler):
    """In place of the order of draws."""

    def _candidates(self) -> list[Untrained]:
        return [group for group in self.untrained if group.finished]


class TakesWeightsForNewerThanTheyAre(Scheduler):
    def publish(self, version: int) -> None:
        super().publish(version + 1)


class KeepsThePlacesOfGroupsLeftOut(Scheduler):
    def leave_out(self, draw: int, *, counts: bool = True, can_fill: bool = False) -> None:
        super().leave_out(draw, counts=counts, can_fill=can_fill)
        self._untrained[draw] = Untrained(draw, self.version, finished=True)
        self._num_finished += 1


class CountsRowsThatCannotBeUsed(Scheduler):
    def leave_out(self, draw: int, *, counts: bool = True, can_fill: bool = False) -> None:
        super().leave_out(draw, counts=True, can_fill=can_fill)


class KeepsOldFillers(Scheduler):
    def take(self) -> list[int]:
        fillers = [*self._fillers]
        chosen = super().take()
        self._fillers = fillers
        return chosen


class NeverFillsUp(Scheduler):
    def _draws_used_up(self) -> bool:
        return False


class FillsUpWhileGroupsRun(Scheduler):
    def _draws_used_up(self) -> bool:
        return self.num_left_out > 0


class ForgetsWhatRanBeforeARestart(Scheduler):
    def restore(self, buffered: Any, fillers: Any, left_out: int, pending: Any = ()) -> None:
        super().restore(buffered, fillers, left_out)


class ForgetsFinishedGroupsInARestart(Scheduler):
    def restore(self, buffered: Any, fillers: Any, left_out: int, pending: Any = ()) -> None:
        super().restore([], fillers, left_out, pending)


@pytest.mark.parametrize(
    "broken",
    [
        AdmitsOneTooMany,
        AdmitsForOneBatchTooMany,
        AdmitsBeyondTheEnd,
        RunsOneTooMany,
        OvertakesWithoutLookingAtDeadlines,
        SeesDeadlinesOneBatchLate,
        SeesDeadlinesOneBatchEarly,
        TakesTheNewestFirst,
        TakesWhateverIsFinished,
        TakesWeightsForNewerThanTheyAre,
        KeepsThePlacesOfGroupsLeftOut,
        CountsRowsThatCannotBeUsed,
        KeepsOldFillers,
        NeverFillsUp,
        FillsUpWhileGroupsRun,
        ForgetsWhatRanBeforeARestart,
        ForgetsFinishedGroupsInARestart,
    ],
)
def test_a_scheduler_with_an_error_in_it_breaks_a_promise(broken: type[Scheduler]):
    for seed in range(4000):
        schedule = random_schedule(seed)
        try:
            run_schedule(schedule, broken)
        except AssertionError:
            run_schedule(schedule)
            return
    raise AssertionError(f"{broken.__name__} keeps every promise")


@pytest.mark.parametrize("order", ["fifo", "window"])
@pytest.mark.parametrize("max_staleness", range(5))
def test_the_bound_is_tight(order, max_staleness: int):
    limits = SchedulerLimits(
        max_staleness, 2, 2 * (max_staleness + 1), order, "wait", 16, num_batches=max_staleness + 3
    )
    # Groups start and end before the trainer does anything.
    ran = run_schedule(Schedule(limits, 1, [KEPT], choices=[-1]))
    assert max(ran.ages.values()) == max_staleness
