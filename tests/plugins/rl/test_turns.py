"""Turns in flat arrays and in rows of a batch say what their records say, merged or not."""

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

from spurline.protocols.collator import ParallelLayout
from spurline.testing.fuzzing import fuzzing
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.preparation import TurnColumns
from spurline_rl.rollout_batches import RolloutsCollator
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import RESPONSE_FIELDS, FlatTurns, Group, Trajectory, Turn, in_one_block, merge_turns

_LACKED = ("logprobs", "versions", "rewards", "support", "routed_experts")
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
    tokens, token, response = flat.tokens(), 0, 0
    named = [(attempt.uid, attempt.sample, number) for attempt in attempts for number in range(len(attempt.turns))]
    assert [*zip(flat.uids, flat.samples.tolist(), flat.numbers.tolist(), strict=True)] == named
    assert [*flat.finish_reasons] == [turn.finish_reason for turn in turns]
    assert len(flat) == len(turns)
    for turn, num_prompt, num_response in zip(turns, flat.num_prompt, flat.num_response, strict=True):
        assert (num_prompt, num_response) == (len(turn.prompt_ids), len(turn.response_ids))
        stop = token + num_prompt + num_response
        assert tokens[token:stop].tolist() == [*turn.prompt_ids, *turn.response_ids]
        if flat.routed_experts is not None:
            np.testing.assert_array_equal(flat.routed_experts[token:stop], turn.routed_experts)
        for name, values in flat.columns.items():
            found, expected = values[response : response + num_response], getattr(turn, name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected, err_msg=name)
        token, response = stop, response + num_response
    assert len(tokens) == token
    given = {name for name in RESPONSE_FIELDS if all(getattr(turn, name) is not None for turn in turns)}
    assert set(flat.columns) == (given if turns else {"loss_mask"})
    assert (flat.routed_experts is None) == (not turns or any(turn.routed_experts is None for turn in turns))


@given(shapes, st.integers(0, 9), st.sets(st.sampled_from(_LACKED)), st.integers(0, 4), st.lists(st.integers(0, 9)))
def test_flat_turns_are_the_records_turn_by_turn_however_blocks_are_cut(shape, seed, lacking, odd_one, cuts):
    attempts = attempts_of(shape, seed, lacking, odd_one)
    assert_says(FlatTurns.of(attempts), attempts)
    assert_says(FlatTurns.join(in_blocks(attempts, cuts)), attempts)
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
                assert np.shares_memory(new.prompt_ids, block.flat.prompts)


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
    assert FlatTurns.of(attempts).tokens().tolist() == [7, 0, 2, 4, 6]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_group_is_freed_with_its_last_reference_whether_its_turns_merge_or_not(goes_on: bool) -> None:
    second = [1, 2, 3] if goes_on else [1, 3, 2]
    turns = tuple(Turn(prompt, [2], [1]) for prompt in ([1], second))  # type: ignore[arg-type]
    group = Group("p", 0, (Trajectory("p", 0, turns),))
    assert len(group.merged.flat) == len(group.flat) - goes_on
    freed = weakref.ref(group)
    gc.disable()
    try:
        del group
        assert freed() is None
    finally:
        gc.enable()


COLUMNS = ("logprobs", "versions", "rewards")


def going_on(shapes: list[tuple[int, int]], seed: int = 0) -> Trajectory:
    """Turns of (tokens since the last response, response tokens), each prompt with all tokens before it."""
    [trajectory] = make_trajectories([shapes], seed=seed)
    seen = np.zeros(0, np.int32)
    turns: list[Turn] = []
    for turn in trajectory.turns:
        turns.append(replace(turn, prompt_ids=np.concatenate([seen, turn.prompt_ids])))
        seen = np.concatenate([turns[-1].prompt_ids, turn.response_ids])
    return replace(trajectory, turns=tuple(turns))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4), st.integers(1, 4))
def test_a_group_holds_the_prompt_of_all_attempts_once_and_that_of_an_attempts_turns_once(shape, count):
    alone = [shape[:1]] * count
    attempts = [replace(going_on(turns, 7), sample=sample) for sample, turns in enumerate([*alone, shape, *alone])]
    block = in_one_block(Group("p", 0, tuple(attempts))).flat
    assert_says(block, attempts)
    # The last turn's prompt contains those before, and only the attempts after it need another copy of the first.
    assert len(block.prompts) == len(attempts[count].turns[-1].prompt_ids) + (len(shape) > 1) * shape[0][0]


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


def test_a_group_in_which_no_turns_merge_is_laid_out_once():
    group = Group("p", 0, (Trajectory("p", 0, (Turn([1], [2], [1]),)),))  # type: ignore[arg-type]
    assert group.merged.flat is group.flat


def test_a_column_that_some_turn_lacks_is_left_out_and_the_last_turn_says_how_it_ended():
    trajectory = going_on([(3, 4), (2, 5)])
    first, second = trajectory.turns
    experts = np.zeros((14, 2, 3), np.int16)
    mixed = (replace(first, logprobs=None), replace(second, finish_reason="length", routed_experts=experts))
    [merged] = merge_turns(replace(trajectory, turns=mixed)).turns
    assert merged.logprobs is None
    assert merged.routed_experts is None
    assert merged.rewards is not None
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


@given(
    shapes=st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4), min_size=1),
    merged=st.booleans(),
    ranks=st.integers(1, 3),
    pad_side=st.sampled_from(["left", "right"]),
)
@fuzzing(60)
def test_what_is_written_for_a_turn_is_read_back_for_it_at_its_own_tokens(shapes, merged, ranks, pad_side):
    attempts = [going_on(shape, number) for number, shape in enumerate(shapes)]
    kept = [merge_turns(attempt) for attempt in attempts] if merged else attempts
    turns = [turn for attempt in attempts for turn in attempt.turns]
    collator = RolloutsCollator(RolloutsCollatorConfig(pad_side=pad_side), 0, ParallelLayout(data=ranks))
    laid_out = [Group("p", 0, tuple(kept))]
    batch = collator.collate_rollouts(laid_out).without_padding_rows()
    columns = TurnColumns(batch, [Group("p", 0, tuple(attempts))], laid_out)
    written = [np.arange(1, len(turn.response_ids) + 1, dtype=np.float32) + 100 * i for i, turn in enumerate(turns)]
    column = columns.join("advantages", np.concatenate(written))
    for found, expected in zip(columns.split(column), written, strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(columns.flatten(column), np.concatenate(written))
    for tokens, turn in zip(columns.split(batch.tokens["input_ids"].float()), turns, strict=True):
        np.testing.assert_array_equal(tokens, turn.response_ids)
    assert int((column != 0).sum()) == columns.num_tokens, "exactly the response tokens are written"
