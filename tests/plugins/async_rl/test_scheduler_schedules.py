"""The scheduler under everything that may happen: the bound holds, nothing waits for ever, and nothing is lost."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from schedule_driver import run_schedule
from schedules import KEPT, Schedule, random_schedule, schedules

from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits, State

SOAK = bool(os.environ.get("SPURLINE_SOAK"))


@pytest.mark.slow
@settings(max_examples=10_000 if SOAK else 200)
@given(schedules())
def test_the_bound_holds_and_every_prompt_is_trained_or_not_for_a_reason_whatever_happens_when(
    schedule: Schedule,
):
    run_schedule(schedule)


@pytest.mark.slow
def test_the_bound_holds_in_schedules_made_of_stragglers_and_restarts():
    for seed in range(50_000 if SOAK else 1_500):
        run_schedule(random_schedule(seed))


class LooksAtEveryGroup(Scheduler):
    """Also where it is known without that a batch has to wait, which must come to the same."""

    _knows_without = True

    def _lacks_due_group(self) -> bool:
        return self._knows_without and super()._lacks_due_group()

    def next_batch(self) -> list[int] | None:
        found = super().next_batch()
        self._knows_without = False
        assert super().next_batch() == found, self
        self._knows_without = True
        return found


def test_a_batch_that_waits_for_a_due_group_would_wait_anyway():
    for seed in range(300):
        run_schedule(random_schedule(seed), LooksAtEveryGroup)


class AdmitsOneTooMany(Scheduler):
    def may_admit(self) -> bool:
        limits = self.limits
        room = limits.most_untrained(self.version, self.taken) + 1
        return self.num_running < limits.max_running and self.num_untrained < room


class AdmitsForOneBatchTooMany(Scheduler):
    """Counts staleness from the batch that is trained, and forgets that this one was taken."""

    def may_admit(self) -> bool:
        limits = self.limits
        room = limits.most_untrained(self.version + 1, self.taken)
        return self.num_running < limits.max_running and self.num_untrained < room


class AdmitsBeyondTheEnd(Scheduler):
    def may_admit(self) -> bool:
        limits = self.limits
        room = (self.version + limits.max_staleness - self.taken + 1) * limits.batch_size
        return self.num_running < limits.max_running and self.num_untrained < room


class RunsOneTooMany(Scheduler):
    def may_admit(self) -> bool:
        limits = self.limits
        room = limits.most_untrained(self.version, self.taken)
        return self.num_running <= limits.max_running and self.num_untrained < room


class OvertakesWithoutLookingAtDeadlines(Scheduler):
    def _lacks_due_group(self) -> bool:
        return False

    def _keeps_deadlines(self, chosen: set[int]) -> bool:
        return True


class SeesDeadlinesOneBatchLate(Scheduler):
    def _lacks_due_group(self) -> bool:
        return False

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
    def _candidates(self) -> list[int]:
        return sorted(super()._candidates(), key=lambda draw: (-self._buffered[draw], draw))


class TakesWhateverIsFinished(Scheduler):
    """In place of the order of draws."""

    def _candidates(self) -> list[int]:
        return sorted(self._buffered)


class TakesWeightsForNewerThanTheyAre(Scheduler):
    def publish(self, version: int) -> None:
        super().publish(version + 1)


class KeepsThePlacesOfGroupsThatAreNotTrained(Scheduler):
    def end(self, draw: int, state: State) -> None:
        super().end(draw, state)
        self._buffered[draw] = self.version


class CountsRowsThatCannotBeUsed(Scheduler):
    def end(self, draw: int, state: State) -> None:
        super().end(draw, state)
        self._num_given_up += state is State.SKIPPED


class FillsUpWithGroupsFilteredForEarlierBatches(Scheduler):
    def take(self, wait_s: float = 0.0, seconds: float = 0.0) -> list[int]:
        filtered = [*self._filtered]
        chosen = super().take(wait_s, seconds)
        self._filtered = filtered
        return chosen


class HoldsBackWhileTrainingWaits(Scheduler):
    def await_batch(self) -> None: ...


class NeverHoldsBack(Scheduler):
    def may_admit(self) -> bool:
        return self._has_room()


class StartsOneBeyondTheDepth(Scheduler):
    def may_admit(self) -> bool:
        return super().may_admit() or (self._has_room() and self.num_untrained == self.depth.groups)


class ForgetsTheDepthInARestart(Scheduler):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({name: part for name, part in state.items() if name != "depth"})


class FallsBelowABatch(Scheduler):
    def take(self, wait_s: float = 0.0, seconds: float = 0.0) -> list[int]:
        chosen = super().take(wait_s, seconds)
        if self.limits.depth == "auto":
            self.depth.value -= 1
        return chosen


class NeverFillsUp(Scheduler):
    def _draws_used_up(self) -> bool:
        return False


class FillsUpWhileGroupsRun(Scheduler):
    def _draws_used_up(self) -> bool:
        return self._num_used_up() > 0


class ForgetsWhatRanBeforeARestart(Scheduler):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending.clear()


class OvertakesWhatRanBeforeARestart(Scheduler):
    def _candidates(self) -> list[int]:
        pending, self._pending = self._pending, deque()
        try:
            return super()._candidates()
        finally:
            self._pending = pending


class ForgetsFinishedGroupsInARestart(Scheduler):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._buffered = {}


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
        KeepsThePlacesOfGroupsThatAreNotTrained,
        CountsRowsThatCannotBeUsed,
        FillsUpWithGroupsFilteredForEarlierBatches,
        HoldsBackWhileTrainingWaits,
        NeverHoldsBack,
        StartsOneBeyondTheDepth,
        ForgetsTheDepthInARestart,
        FallsBelowABatch,
        NeverFillsUp,
        FillsUpWhileGroupsRun,
        ForgetsWhatRanBeforeARestart,
        OvertakesWhatRanBeforeARestart,
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
