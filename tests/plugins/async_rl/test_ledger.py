"""The ledger: every prompt in exactly one state, and no way from one to another that would lose or repeat it."""

from __future__ import annotations

import pytest

from spurline_async_rl.scheduling.ledger import Ledger, State

LEFT_OUT = (State.QUARANTINED, State.SKIPPED)


def in_state(state: State) -> Ledger:
    """A ledger whose only draw is in this state."""
    ledger = Ledger()
    ledger.draw()
    if state is not State.PENDING:
        ledger.move(0, State.RUNNING)
    if state not in (State.PENDING, State.RUNNING):
        ledger.move(0, state)
    return ledger


def test_draws_are_numbered_from_0_and_begin_as_pending():
    ledger = Ledger()
    assert [ledger.draw() for _ in range(3000)] == [*range(3000)]
    assert ledger.num_drawn == 3000
    assert ledger.in_state(State.PENDING) == [*range(3000)]


@pytest.mark.parametrize("state", [State.BUFFERED, State.FILTERED])
def test_what_has_rewards_can_be_trained_on_once(state: State):
    ledger = in_state(state)
    ledger.train(0, 7)
    assert ledger.trained() == {0: 7}
    with pytest.raises(AssertionError, match="draw 0 is trained and cannot be trained on"):
        ledger.train(0, 8)


@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING, *LEFT_OUT])
def test_nothing_else_can_be_trained_on(state: State):
    with pytest.raises(AssertionError, match="cannot be trained on"):
        in_state(state).train(0, 1)


@pytest.mark.parametrize("state", [State.BUFFERED, State.FILTERED, *LEFT_OUT])
def test_a_prompt_that_has_come_to_an_end_does_not_start_again(state: State):
    for following in State:
        with pytest.raises(AssertionError, match="cannot go from"):
            in_state(state).move(0, following)


def test_a_prompt_does_not_come_to_an_end_without_having_run_unless_its_row_cannot_be_used():
    for following in (State.BUFFERED, State.FILTERED, State.QUARANTINED):
        with pytest.raises(AssertionError, match="cannot go from pending"):
            in_state(State.PENDING).move(0, following)
    ledger = in_state(State.PENDING)
    ledger.move(0, State.SKIPPED)
    assert ledger.counts()["skipped"] == 1


def test_a_prompt_that_was_never_drawn_is_refused():
    with pytest.raises(AssertionError, match="draw 1 of 1"):
        in_state(State.PENDING).move(1, State.RUNNING)


def test_counts_follow_every_move_and_sum_up_to_what_was_drawn():
    ledger = Ledger()
    for state in (*State, State.BUFFERED):
        draw = ledger.draw()
        if state is not State.PENDING:
            ledger.move(draw, State.RUNNING)
        if state not in (State.PENDING, State.RUNNING):
            ledger.move(draw, state)
    ledger.train(2, 1)
    names = ["pending", "running", "buffered", "trained", "filtered", "quarantined", "skipped"]
    assert ledger.counts() == dict.fromkeys(names, 1)
    ledger.check(running=1, buffered=1)


def test_a_scheduler_that_holds_something_else_is_found_out():
    ledger = in_state(State.RUNNING)
    with pytest.raises(AssertionError, match="the scheduler has 0 running, 1 buffered"):
        ledger.check(running=0, buffered=1)


def test_a_state_that_changed_behind_the_counts_is_found_out():
    ledger = in_state(State.RUNNING)
    ledger._states[0] = State.BUFFERED
    with pytest.raises(AssertionError, match="the ledger holds"):
        ledger.check(running=1, buffered=0)


def test_after_a_restart_groups_that_were_under_way_are_pending_and_the_rest_is_as_before():
    ledger = Ledger()
    for _ in range(5):
        ledger.move(ledger.draw(), State.RUNNING)
    ledger.move(1, State.BUFFERED)
    ledger.move(2, State.FILTERED)
    ledger.move(3, State.BUFFERED)
    ledger.train(3, 1)
    saved = ledger.state_dict()
    ledger.move(4, State.QUARANTINED)
    again = Ledger()
    again.load_state_dict(saved)
    assert again.in_state(State.PENDING) == [0, 4]
    assert (again.in_state(State.BUFFERED), again.in_state(State.FILTERED)) == ([1], [2])
    assert again.trained() == {3: 1}
    assert again.draw() == 5
    again.check(running=0, buffered=1)
