"""Turns that go on from each other become one; all others stay as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spurline.testing.fuzzing import fuzzing
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import Trajectory, Turn, merge_turns

COLUMNS = ("logprobs", "versions", "rewards", "advantages", "values", "returns")


def going_on(shapes: list[tuple[int, int]], seed: int = 0) -> Trajectory:
    """Turns of (tokens since the last response, response tokens), each prompt with all tokens before it."""
    [trajectory] = make_trajectories([shapes], seed=seed)
    seen = np.zeros(0, np.int32)
    turns: list[Turn] = []
    for turn in trajectory.turns:
        turns.append(replace(turn, prompt_ids=np.concatenate([seen, turn.prompt_ids])))
        seen = np.concatenate([turns[-1].prompt_ids, turn.response_ids])
    return replace(trajectory, turns=tuple(turns))


@given(
    shapes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=7), seed=st.integers(0, 99)
)
@fuzzing(60)
def test_every_response_token_keeps_its_values_and_tokens_in_between_get_none(shapes, seed):
    trajectory = going_on(shapes, seed)
    [merged] = merge_turns(trajectory).turns
    last = trajectory.turns[-1]
    whole = np.concatenate([merged.prompt_ids, merged.response_ids])
    assert whole.tolist() == [*last.prompt_ids.tolist(), *last.response_ids.tolist()]
    assert merged.prompt_ids.tolist() == trajectory.turns[0].prompt_ids.tolist()
    for name in ("loss_mask", *COLUMNS):
        expected = np.zeros(len(whole), getattr(last, name).dtype)
        for turn in trajectory.turns:
            start = len(turn.prompt_ids)
            expected[start : start + len(turn.response_ids)] = getattr(turn, name)
        assert getattr(merged, name).tolist() == expected[len(merged.prompt_ids) :].tolist(), name
        assert getattr(merged, name).dtype == expected.dtype, name


def test_a_turn_that_rewrites_history_leaves_all_turns_apart():
    trajectory = going_on([(3, 4), (2, 5), (1, 2)])
    first, second, third = trajectory.turns
    changed = second.prompt_ids.copy()
    changed[4] += 1
    rewritten = replace(trajectory, turns=(first, replace(second, prompt_ids=changed), third))
    assert merge_turns(rewritten) is rewritten
    shorter = replace(trajectory, turns=(first, replace(second, prompt_ids=second.prompt_ids[:6])))
    assert merge_turns(shorter) is shorter


def test_a_single_turn_is_left_alone():
    trajectory = going_on([(3, 4)])
    assert merge_turns(trajectory) is trajectory


def test_a_column_that_some_turn_lacks_is_left_out_and_the_last_turn_says_how_it_ended():
    trajectory = going_on([(3, 4), (2, 5)])
    first, second = trajectory.turns
    mixed = (replace(first, logprobs=None), replace(second, finish_reason="length"))
    [merged] = merge_turns(replace(trajectory, turns=mixed)).turns
    assert merged.logprobs is None
    assert merged.advantages is not None
    assert merged.finish_reason == "length"


def test_routed_experts_are_those_that_the_next_token_was_sampled_with():
    trajectory = going_on([(3, 4), (2, 5)])
    later = np.arange(14 * 6, dtype=np.int16).reshape(14, 2, 3)
    earlier = later[:7] + 100
    # Nothing was computed at the last token of a turn before the next one began.
    earlier[6] = -1
    first, second = trajectory.turns
    turns = (replace(first, routed_experts=earlier), replace(second, routed_experts=later))
    [merged] = merge_turns(replace(trajectory, turns=turns)).turns
    assert merged.routed_experts is not None
    assert np.array_equal(merged.routed_experts, np.concatenate([earlier[:6], later[6:]]))


def test_a_turn_without_experts_leaves_the_merged_one_without():
    first, second = (trajectory := going_on([(3, 4), (2, 5)])).turns
    turns = (first, replace(second, routed_experts=np.zeros((14, 2, 3), np.int16)))
    [merged] = merge_turns(replace(trajectory, turns=turns)).turns
    assert merged.routed_experts is None
