"""Turns in flat arrays say what their records say, however they came into blocks."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import RESPONSE_FIELDS, FlatTurns, Group, Trajectory, Turn, in_one_block

_LACKED = ("logprobs", "versions", "rewards", "routed_experts")
shapes = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=3), min_size=1, max_size=5
)


def attempts_of(shape: Any, seed: int, lacking: set[str], odd_one: int) -> list[Trajectory]:
    """Attempts, one of which lacks some fields in its first turn."""
    attempts = make_trajectories(shape, seed, routed_experts=True)
    place = odd_one % len(attempts)
    first, *others = attempts[place].turns
    missing: dict[str, Any] = dict.fromkeys(lacking)
    attempts[place] = replace(attempts[place], turns=(replace(first, **missing, finish_reason="length"), *others))
    return attempts


def in_blocks(attempts: Sequence[Trajectory], cuts: Sequence[int]) -> list[FlatTurns]:
    bounds = [0, *sorted(cut % (len(attempts) + 1) for cut in cuts), len(attempts)]
    return [FlatTurns.of(attempts[start:stop]) for start, stop in pairwise(bounds)]


def assert_says(flat: FlatTurns, attempts: Sequence[Trajectory]) -> None:
    """Walk along the flat arrays turn by turn."""
    assert flat.attempt_turns.tolist() == [len(attempt.turns) for attempt in attempts]
    turns = [turn for attempt in attempts for turn in attempt.turns]
    token = response = 0
    named = [(attempt.uid, attempt.sample, number) for attempt in attempts for number in range(len(attempt.turns))]
    assert [*zip(flat.uids, flat.samples.tolist(), flat.numbers.tolist(), strict=True)] == named
    assert [*flat.finish_reasons] == [turn.finish_reason for turn in turns]
    assert len(flat) == len(turns)
    for turn, num_prompt, num_response in zip(turns, flat.num_prompt, flat.num_response, strict=True):
        assert (num_prompt, num_response) == (len(turn.prompt_ids), len(turn.response_ids))
        stop = token + num_prompt + num_response
        assert flat.tokens[token:stop].tolist() == [*turn.prompt_ids, *turn.response_ids]
        if flat.routed_experts is not None:
            np.testing.assert_array_equal(flat.routed_experts[token:stop], turn.routed_experts)
        for name, values in flat.columns.items():
            found, expected = values[response : response + num_response], getattr(turn, name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected, err_msg=name)
        token, response = stop, response + num_response
    assert len(flat.tokens) == token
    given = {name for name in RESPONSE_FIELDS if all(getattr(turn, name) is not None for turn in turns)}
    assert set(flat.columns) == (given if turns else {"loss_mask"})
    assert (flat.routed_experts is None) == (not turns or any(turn.routed_experts is None for turn in turns))


@given(shapes, st.integers(0, 9), st.sets(st.sampled_from(_LACKED)), st.integers(0, 4), st.lists(st.integers(0, 9)))
def test_flat_turns_are_the_records_turn_by_turn_however_blocks_are_cut(shape, seed, lacking, odd_one, cuts):
    attempts = attempts_of(shape, seed, lacking, odd_one)
    assert_says(FlatTurns.of(attempts), attempts)
    assert_says(FlatTurns.join(in_blocks(attempts, cuts)), attempts)


def test_no_turns_are_flat_too() -> None:
    assert_says(FlatTurns.of([]), [])
    assert_says(FlatTurns.join([]), [])


@given(shapes, st.integers(0, 9), st.sets(st.sampled_from(_LACKED)), st.integers(0, 4))
def test_a_group_in_one_block_is_the_same_group_and_in_memory_once(shape, seed, lacking, odd_one):
    group = Group("p", 3, tuple(attempts_of(shape, seed, lacking, odd_one)), {"weight": 2.0})
    block = in_one_block(group)
    assert (block.uid, block.draw, block.columns) == (group.uid, group.draw, group.columns)
    assert_says(block.flat, group.trajectories)
    for before, after in zip(group.trajectories, block.trajectories, strict=True):
        assert replace(before, turns=()) == replace(after, turns=())
        for old, new in zip(before.turns, after.turns, strict=True):
            for field in fields(Turn):
                expected, found = getattr(old, field.name), getattr(new, field.name)
                np.testing.assert_array_equal(found, expected, err_msg=field.name)
                if field.name in block.flat.columns and len(found):
                    assert np.shares_memory(found, block.flat.columns[field.name])
            if len(new.prompt_ids):
                assert np.shares_memory(new.prompt_ids, block.flat.tokens)


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=4))
def test_versions_are_counted_over_trained_tokens(turns):
    attempts: list[Trajectory] = []
    for sample, tokens in enumerate(turns):
        mask, versions = [int(trained) for _, trained in tokens], [version for version, _ in tokens]
        attempts.append(Trajectory("p", sample, (Turn([1], [2] * len(tokens), mask, versions=versions),)))  # type: ignore[arg-type]
    versions, counts = FlatTurns.of(attempts).trained_versions
    expected = Counter(version for turn in turns for version, trained in turn if trained)
    assert [*zip(versions.tolist(), counts.tolist(), strict=True)] == sorted(expected.items())


def test_an_array_with_gaps_is_joined_by_its_values() -> None:
    response = np.arange(8, dtype=np.int32)[::2]
    attempts = [Trajectory("p", 0, (Turn(np.array([7], np.int32), response, np.ones(4, np.uint8)),))]
    assert FlatTurns.of(attempts).tokens.tolist() == [7, 0, 2, 4, 6]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_group_is_freed_with_its_last_reference_whether_its_turns_merge_or_not(goes_on: bool) -> None:
    second = [1, 2, 3] if goes_on else [1, 3, 2]
    turns = tuple(Turn(prompt, [2], [1]) for prompt in ([1], second))  # type: ignore[arg-type]
    group = Group("p", 0, (Trajectory("p", 0, turns),))
    assert (group.merged is not group) == goes_on
    assert len(group.merged.flat) == len(group.flat) - goes_on
    freed = weakref.ref(group)
    gc.disable()
    try:
        del group
        assert freed() is None
    finally:
        gc.enable()
