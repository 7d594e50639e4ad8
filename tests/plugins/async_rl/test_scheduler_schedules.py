"""The scheduler under everything that may happen: the bound holds, nothing waits for ever, and nothing is lost."""

from __future__ import annotations

import pytest
from every_run import SOAK
from hypothesis import given, settings
from schedule_driver import KEPT, Schedule, random_schedule, run_schedule, schedules

from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits


@pytest.mark.slow
@settings(max_examples=10_000 if SOAK else 200)
@given(schedules())
def test_the_bound_holds_and_every_prompt_is_trained_or_not_for_a_reason_whatever_happens_when(schedule: Schedule):
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


@pytest.mark.parametrize("order", ["fifo", "window"])
@pytest.mark.parametrize("max_staleness", range(5))
def test_the_bound_is_tight(order, max_staleness: int):
    limits = SchedulerLimits(max_staleness, 2, 2 * (max_staleness + 1), order, 16, num_batches=max_staleness + 3)
    # Groups start and end before the trainer does anything.
    ran = run_schedule(Schedule(limits, 1, [KEPT], choices=[-1]))
    assert max(ran.ages.values()) == max_staleness
