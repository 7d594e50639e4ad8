"""Check that a collator of rollouts keeps its contract and gives the same batches as a reference."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spurline.protocols.collator import ParallelLayout
from spurline.testing.collator_contract import PAD, assert_batches_equal, layout_strategy, turns_in
from spurline.testing.fuzzing import fuzzing
from spurline.testing.samples import check_batch
from spurline_rl.rollout_batches import RolloutCollator
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import Group, Trajectory

_TURN_COLUMNS = ("logprobs", "versions", "rewards", "support", "routed_experts")


class RolloutCollatorContract:
    """A test suite: define `make_collator(pad_token_id, layout)` in a subclass. Turns have up to 40 tokens.

    If `make_reference` returns another collator, the batches of both must be bit-identical.
    """

    def make_collator(self, pad_token_id: int, layout: ParallelLayout) -> RolloutCollator:
        raise NotImplementedError("subclass RolloutCollatorContract with make_collator(self, pad_token_id, layout)")

    def make_reference(self, pad_token_id: int, layout: ParallelLayout) -> RolloutCollator | None:
        """Return a collator that must make the same batches, or None if there is none."""
        return None

    _turns_strategy = st.lists(
        st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(any), min_size=1, max_size=4),
        min_size=1,
        max_size=6,
    )

    @given(turns=_turns_strategy, ranks=st.integers(1, 4), optional=st.booleans(), seed=st.integers(0, 9))
    @fuzzing(40)
    def test_every_turn_is_in_exactly_one_segment_with_its_columns(
        self, turns: Any, ranks: int, optional: bool, seed: int
    ) -> None:
        trajectories = make_trajectories(turns, seed, optional_columns=optional)
        batch = self.make_collator(PAD, ParallelLayout(data=ranks)).collate_rollouts([_group(trajectories)])
        check_batch(batch)
        assert batch.num_rows % ranks == 0
        assert bool((batch.tokens["input_ids"][batch.tokens["segment_ids"] == 0] == PAD).all())
        assert ("rewards" in batch.tokens) == optional
        expected = _turns_of(trajectories)
        assert turns_in(batch) == expected
        assert not bool(batch.is_padding_row[: len(expected)].any()), "padding rows come before turns"

    @given(
        turns=_turns_strategy,
        layout=layout_strategy,
        cuts=st.lists(st.integers(0, 6), max_size=6),
        columns=st.sets(st.sampled_from(_TURN_COLUMNS)),
        odd_one=st.integers(0, 5),
        seed=st.integers(0, 9),
    )
    @fuzzing(60)
    def test_the_reference_gives_the_same_batch_bit_for_bit_however_groups_are_cut(
        self, turns: Any, layout: ParallelLayout, cuts: list[int], columns: set[str], odd_one: int, seed: int
    ) -> None:
        collator, reference = self.make_collator(PAD, layout), self.make_reference(PAD, layout)
        trajectories = make_trajectories(turns, seed, routed_experts=True)
        # One turn lacks the columns that are not in `columns`, so the batch must not have them either.
        place = odd_one % len(trajectories)
        first, *others = trajectories[place].turns
        missing: dict[str, Any] = {name: None for name in _TURN_COLUMNS if name not in columns}
        trajectories[place] = replace(trajectories[place], turns=(replace(first, **missing), *others))
        expected = (reference or collator).collate_rollouts([_group(trajectories)])
        bounds = [0, *sorted(min(cut, len(turns)) for cut in cuts), len(turns)]
        groups = [_group(trajectories[start:stop]) for start, stop in itertools.pairwise(bounds)]
        responses = [weakref.ref(group.flat.responses) for group in groups]
        batch = collator.collate_rollouts(groups)
        del groups
        assert all(array() is None for array in responses), "the batch keeps tokens of its groups in memory"
        assert_batches_equal(batch, expected)

    def test_no_trajectories_give_padding_rows_alone(self) -> None:
        batch = self.make_collator(PAD, ParallelLayout(data=3)).collate_rollouts([])
        check_batch(batch)
        assert batch.num_rows == 3
        assert bool(batch.is_padding_row.all())


def _group(trajectories: Sequence[Trajectory]) -> Group:
    return Group("prompt", 0, tuple(trajectories))


def _turns_of(trajectories: Sequence[Trajectory]) -> list[tuple[Any, ...]]:
    expected: list[tuple[Any, ...]] = []
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns):
            no_prompt = [0.0] * len(turn.prompt_ids)
            weights = [*no_prompt, *turn.loss_mask.astype(float).tolist()]
            columns = [[*turn.prompt_ids.tolist(), *turn.response_ids.tolist()], [0.0, *weights[1:]]]
            if turn.rewards is not None:
                columns.append([*no_prompt, *turn.rewards.tolist()])
            expected.append((trajectory.uid, trajectory.sample, number, *columns))
    return expected
