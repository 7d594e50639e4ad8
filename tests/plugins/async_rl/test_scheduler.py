"""The scheduler by examples: what may start, what may be taken, and what each setting changes in that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits, State


def make(**changes: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "max_staleness": 1,
        "batch_size": 2,
        "max_running": 4,
        "order": "window",
        "draw_limit": 16,
        "num_batches": 10,
    }
    return Scheduler(SchedulerLimits(**{**defaults, **changes}))


def admit_all(scheduler: Scheduler) -> list[int]:
    """Start groups while that is allowed; their draws."""
    draws: list[int] = []
    while scheduler.may_admit():
        draws.append(scheduler.draw())
        scheduler.admit(draws[-1])
    return draws


def finish(scheduler: Scheduler, *draws: int) -> None:
    for draw in draws:
        scheduler.end(draw, State.BUFFERED)


def test_groups_start_for_as_many_batches_as_their_tokens_may_be_updates_old():
    scheduler = make(max_running=100)
    assert admit_all(scheduler) == [0, 1, 2, 3]
    finish(scheduler, 0, 1, 2, 3)
    scheduler.take()
    assert not scheduler.may_admit()
    scheduler.publish(1)
    assert admit_all(scheduler) == [4, 5]


def test_in_a_window_a_finished_group_overtakes_one_that_can_still_be_trained_in_time():
    scheduler = make()
    admit_all(scheduler)
    finish(scheduler, 1, 3)
    assert scheduler.next_batch() == [1, 3]


def test_in_a_window_the_batch_waits_for_a_group_that_would_become_too_old():
    scheduler = make()
    admit_all(scheduler)
    finish(scheduler, 1, 3)
    scheduler.take()
    scheduler.publish(1)
    assert admit_all(scheduler) == [4, 5]
    finish(scheduler, 2, 4, 5)
    assert scheduler.next_batch() is None
    scheduler.end(0, State.BUFFERED)
    assert scheduler.take() == [0, 2]


def test_with_masks_the_batch_takes_what_is_finished():
    scheduler = make(at_bound="mask")
    admit_all(scheduler)
    finish(scheduler, 1, 3)
    scheduler.take()
    scheduler.publish(1)
    admit_all(scheduler)
    finish(scheduler, 2, 4)
    assert scheduler.next_batch() == [2, 4]


def test_first_in_first_out_waits_for_the_earliest_draw():
    scheduler = make(order="fifo")
    admit_all(scheduler)
    finish(scheduler, 1, 2, 3)
    assert scheduler.next_batch() is None
    scheduler.end(0, State.BUFFERED)
    assert scheduler.take() == [0, 1]


@pytest.mark.parametrize("order", ["fifo", "window"])
def test_a_filtered_group_makes_way_for_another(order: str):
    scheduler = make(order=order, max_staleness=0)
    admit_all(scheduler)
    scheduler.end(0, State.FILTERED)
    assert admit_all(scheduler) == [2]
    finish(scheduler, 1, 2)
    assert scheduler.take() == [1, 2]


def test_when_draws_are_used_up_the_earliest_filtered_ones_fill_the_batch():
    scheduler = make(max_staleness=0, draw_limit=4)
    admit_all(scheduler)
    scheduler.end(0, State.GIVEN_UP)
    scheduler.end(1, State.FILTERED)
    assert admit_all(scheduler) == [2, 3]
    scheduler.end(2, State.BUFFERED)
    assert scheduler.next_batch() is None
    scheduler.end(3, State.FILTERED)
    assert not scheduler.is_exhausted()
    assert scheduler.take() == [1, 2]
    assert scheduler.filtered == []


def test_when_too_few_of_all_draws_can_be_trained_on_the_batch_cannot_be_filled():
    scheduler = make(max_staleness=0, draw_limit=2)
    admit_all(scheduler)
    scheduler.end(0, State.GIVEN_UP)
    scheduler.end(1, State.BUFFERED)
    assert scheduler.next_batch() is None
    assert scheduler.is_exhausted()


def test_rows_that_cannot_be_used_do_not_use_up_draws():
    scheduler = make(max_staleness=0, draw_limit=2)
    for draw in range(50):
        assert scheduler.draw() == draw
        scheduler.admit(draw)
        scheduler.end(draw, State.SKIPPED)
    assert admit_all(scheduler) == [50, 51]


def test_after_a_restart_first_in_first_out_waits_for_groups_that_have_not_started_again():
    scheduler = make(order="fifo", max_running=1)
    states = np.array([State.RUNNING, State.RUNNING, State.BUFFERED, State.BUFFERED])
    scheduler.load_state_dict(
        {"ledger": {"states": states}, "buffered": [[2, 0], [3, 0]], "fillers": [], "left_out": 0}
    )
    assert scheduler.next_batch() is None
    with pytest.raises(AssertionError, match=r"draw 4 cannot start before \[0, 1\]"):
        scheduler.admit(4)
    assert scheduler.draw() == 0
    scheduler.skip(0)
    assert scheduler.draw() == 1
    scheduler.admit(1)
    assert scheduler.next_batch() is None
    scheduler.end(1, State.BUFFERED)
    assert scheduler.take() == [1, 2]


def test_while_training_is_busy_no_more_groups_are_untrained_than_the_depth():
    scheduler = make(max_running=3, max_staleness=4, depth=3)
    assert admit_all(scheduler) == [0, 1, 2]
    finish(scheduler, 0, 1, 2)
    assert not scheduler.may_admit()
    scheduler.take()
    assert admit_all(scheduler) == [3, 4]


def test_while_training_waits_groups_start_as_far_ahead_as_the_bound_allows():
    scheduler = make(max_running=100, depth=2)
    assert admit_all(scheduler) == [0, 1]
    scheduler.await_batch()
    assert admit_all(scheduler) == [2, 3]
    finish(scheduler, 0, 1, 2, 3)
    scheduler.take()
    scheduler.publish(1)
    assert not scheduler.may_admit()


def test_that_the_depth_holds_groups_back_does_not_mean_that_draws_have_run_out():
    # The prompt that `fifo` waits for was interrupted, as many groups as the depth allows are finished after it.
    scheduler = make(order="fifo", depth=2, draw_limit=16)
    states = np.array([State.RUNNING, State.BUFFERED, State.BUFFERED, State.FILTERED, State.FILTERED])
    saved = {"ledger": {"states": states}, "buffered": [[1, 0], [2, 0]], "fillers": [3, 4], "left_out": 2}
    scheduler.load_state_dict(saved)
    assert not scheduler.may_admit()
    assert scheduler.next_batch() is None
    assert not scheduler.is_exhausted()
    scheduler.await_batch()
    assert scheduler.draw() == 0
    scheduler.admit(0)
    finish(scheduler, 0)
    assert scheduler.take() == [0, 1]


def test_only_a_batch_that_lacked_groups_makes_the_depth_rise():
    def after(lacking: bool, order: str = "window") -> float:
        scheduler = make(max_staleness=4, max_running=4, depth="auto", order=order)
        admit_all(scheduler)
        finish(scheduler, 0, 1, 2, 3)
        admit_all(scheduler)
        assert not scheduler.may_admit()
        if lacking:
            scheduler.take()
        before = scheduler.depth.value
        scheduler.take(wait_s=0.5, seconds=1.0)
        return scheduler.depth.value - before

    assert after(lacking=True) > 0
    assert after(lacking=False) <= 0
    assert after(lacking=False, order="fifo") > 0
