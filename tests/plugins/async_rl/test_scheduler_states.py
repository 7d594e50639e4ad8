"""The states of prompts: every one in exactly one, and no way from one to another that would lose or repeat it."""

from __future__ import annotations

import pytest
from schedule_driver import assert_nothing_lost

from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits, State

ENDS = (State.BUFFERED, State.FILTERED, State.GIVEN_UP, State.SKIPPED)


def make(batch_size: int = 1, draw_limit: int = 1) -> Scheduler:
    return Scheduler(SchedulerLimits(1, batch_size, 8, "window", draw_limit, num_batches=10))


def start(scheduler: Scheduler) -> int:
    draw = scheduler.draw()
    scheduler.admit(draw)
    return draw


def in_state(state: State) -> Scheduler:
    """A scheduler whose only draw is in this state; its next batch has one group."""
    scheduler = make()
    if state is State.PENDING:
        scheduler.draw()
        return scheduler
    start(scheduler)
    if state is State.TRAINED:
        scheduler.end(0, State.BUFFERED)
        scheduler.take()
    elif state is not State.RUNNING:
        scheduler.end(0, state)
    return scheduler


@pytest.mark.parametrize("state", State)
def test_no_prompt_is_lost_or_repeated_by_a_move(state: State):
    allowed = {
        State.PENDING: {State.RUNNING, State.SKIPPED},
        State.RUNNING: {*ENDS, State.PENDING},
        State.BUFFERED: {State.TRAINED, State.PENDING},
        State.FILTERED: {State.TRAINED},
    }.get(state, set())
    for following in State:
        scheduler = in_state(state)
        if following in allowed:
            scheduler._move(0, following)
        else:
            with pytest.raises(AssertionError, match="draw 0 cannot go from"):
                scheduler._move(0, following)


def test_only_the_earliest_pending_prompt_starts_and_only_drawn_ones_end():
    with pytest.raises(AssertionError, match="draw 1 of 1"):
        in_state(State.RUNNING).end(1, State.BUFFERED)
    with pytest.raises(AssertionError, match=r"draw 1 cannot start before \[0\]"):
        in_state(State.PENDING).admit(1)
    scheduler = make()
    for number in range(3000):
        assert scheduler.draw() == scheduler.draw() == number
        scheduler.skip(number)
    assert scheduler.in_state(State.SKIPPED) == [*range(3000)]


def test_groups_given_back_start_again_before_all_others():
    scheduler = make(batch_size=2, draw_limit=64)
    for state in (State.BUFFERED, State.FILTERED, State.BUFFERED):
        scheduler.end(start(scheduler), state)
    assert start(scheduler) == 3
    scheduler.discard_filtered(1)
    for draw in (3, 0):
        scheduler.give_back(draw)
        assert_nothing_lost(scheduler)
    assert (scheduler.in_state(State.PENDING), scheduler.in_state(State.BUFFERED)) == ([0, 3], [2])
    assert (scheduler.in_state(State.FILTERED), scheduler.filtered) == ([1], [])
    assert [start(scheduler) for _ in range(2)] == [0, 3]
    scheduler.end(0, State.BUFFERED)
    scheduler.check()
    assert scheduler.take() == [0, 2]


def test_a_checkpoint_that_holds_other_groups_than_its_states_say_is_found_out():
    saved = in_state(State.BUFFERED).state_dict()
    with pytest.raises(AssertionError, match=r"draws \[\] .* buffered, but \[0\]"):
        make().load_state_dict({**saved, "buffered": []})


def test_groups_that_may_not_be_kept_are_pending_again_after_a_restart():
    scheduler = make(draw_limit=64)
    for state in (State.BUFFERED, State.FILTERED, State.GIVEN_UP):
        scheduler.end(start(scheduler), state)
    again = make(draw_limit=64)
    again.load_state_dict(scheduler.state_dict(), keep_groups=False)
    assert again.in_state(State.PENDING) == [0, 1]
    assert (again.num_buffered, again.filtered, again.in_state(State.GIVEN_UP)) == (0, [], [2])
    assert again.state_dict()["left_out"] == 1
    assert again.draw() == 0
    again.check()


@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING, State.BUFFERED])
def test_a_state_that_changed_behind_the_scheduler_is_found_out_when_a_batch_is_taken(state: State):
    scheduler = make(batch_size=2, draw_limit=8)
    for _ in range(2):
        scheduler.end(start(scheduler), State.BUFFERED)
    scheduler._states[0] = state if state is not State.BUFFERED else State.GIVEN_UP
    with pytest.raises(AssertionError, match="have this state"):
        scheduler.take()
