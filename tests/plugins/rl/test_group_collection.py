"""Collecting the groups of a step: exactly the missing number is drawn, in order, within the limit."""

from __future__ import annotations

import itertools

import pytest
from collected_groups import BAD, EQUAL, LOST, UNREADABLE, VARIED, collect
from hypothesis import given
from hypothesis import strategies as st

from spurline.errors import RunFailedError
from spurline_rl.prompt_source import Collected


def drawn(collected: Collected) -> list[int]:
    return [group.draw for group in collected.groups]


def test_groups_with_equal_rewards_make_way_for_exactly_as_many_further_prompts():
    rounds: list[int] = []
    collected = collect([VARIED, EQUAL, EQUAL, VARIED], rounds)
    assert rounds == [2, 1, 1]
    assert (drawn(collected), collected.next_draw, collected.refill_missing) == ([0, 3], 4, 0)
    assert [group.draw for group in collected.every] == [0, 1, 2, 3]


def test_rows_that_cannot_be_used_are_replaced_and_are_no_part_of_the_limit():
    rounds: list[int] = []
    collected = collect([BAD, UNREADABLE, UNREADABLE, BAD, VARIED, BAD, VARIED], rounds, draw_limit=2)
    assert rounds == [2, 2, 2, 1]
    assert (drawn(collected), collected.skipped, collected.given_up, collected.next_draw) == ([4, 6], 5, (), 7)


def test_at_the_limit_the_earliest_of_those_left_out_are_used_after_all():
    collected = collect(lambda number: VARIED if number == 3 else EQUAL, count=3, draw_limit=5)
    assert (drawn(collected), collected.next_draw, collected.refill_missing) == ([0, 1, 3], 5, 2)


def test_too_many_lost_prompts_end_the_run():
    with pytest.raises(RunFailedError, match=r"drew 4 .* 3 of them .* 1 of 2 groups.*max_draws_per_step: 4"):
        collect([VARIED, LOST, LOST, LOST], draw_limit=4)


@given(
    fates=st.lists(st.sampled_from([VARIED, EQUAL, LOST, BAD, UNREADABLE]), min_size=40, max_size=40),
    count=st.integers(1, 5),
    first=st.integers(0, 10),
    limit=st.integers(5, 30),
    leave_out=st.booleans(),
)
def test_every_drawn_prompt_is_accounted_for_and_none_is_drawn_without_need(fates, count, first, limit, leave_out):
    # The order is endless; behind what is drawn at random every prompt can be used.
    fate = lambda number: fates[number] if number < len(fates) else VARIED  # noqa: E731
    usable = (number for number in itertools.count(first) if fate(number) not in (BAD, UNREADABLE))
    within_limit = list(itertools.islice(usable, limit))
    settings = {"first_draw": first, "count": count, "draw_limit": limit, "filters": leave_out}
    try:
        collected = collect(fate, **settings)
    except RunFailedError:
        assert sum(fate(number) != LOST for number in within_limit) < count
        return
    taken = [fate(number) for number in range(first, collected.next_draw)]
    assert len(collected.groups) == count
    assert len(taken) == len(collected.every) + len(collected.given_up) + collected.skipped
    assert len(taken) - collected.skipped <= limit
    assert collected.skipped == taken.count(BAD) + taken.count(UNREADABLE)
    assert len(collected.given_up) == taken.count(LOST)
    assert drawn(collected) == sorted(drawn(collected))
    wanted = [fate for fate in taken if fate == VARIED or (fate == EQUAL and not leave_out)]
    assert collected.refill_missing == count - len(wanted)
    if len(wanted) == count:
        assert taken[-1] in wanted, "the last draw was needed"
