"""Check that an advantage algorithm keeps its contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import ClassVar

import numpy as np
import pytest

from spurline_rl.protocols.advantage import Advantage, ComparesSamples
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import Group, Trajectory, Turn, turns_of

_WRITTEN = ("advantages", "returns")


class AdvantageContract:
    """A test suite: define `make_advantage()` in a subclass. Rewards and critic values are random, from 0 to 1.

    Attributes:
        compares_samples: Whether a group with equal rewards has advantage 0. Set it to False if your algorithm's
            baseline does not come from the group.
        carry: Names in `Group.columns` that your algorithm reads. The tests fill the columns with 0.5 to 1.5.
    """

    compares_samples = True
    carry: ClassVar[tuple[str, ...]] = ()

    def make_advantage(self) -> Advantage:
        raise NotImplementedError("subclass AdvantageContract with make_advantage(self)")

    def groups(self, seed: int = 0, num_groups: int = 4) -> list[Group]:
        """Return groups of 2 to 4 samples. Each sample has 1 to 3 turns, and each turn 0 to 5 tokens."""
        random = np.random.default_rng(seed)
        groups: list[Group] = []
        for draw in range(num_groups):
            # The last turn is never empty, because its last token gets the reward of the whole trajectory.
            lengths = [
                [*random.integers(0, 6, random.integers(0, 3)), random.integers(1, 6)]
                for _ in range(random.integers(2, 5))
            ]
            made = make_trajectories([[(3, length) for length in turns] for turns in lengths], seed + draw)
            attempts = tuple(replace(each, uid=f"prompt-{draw}", sample=sample) for sample, each in enumerate(made))
            columns = {name: float(random.uniform(0.5, 1.5)) for name in self.carry}
            groups.append(Group(f"prompt-{draw}", draw, attempts, columns))
        return groups

    def test_it_describes_itself_and_the_fields_of_a_turn_that_it_needs(self) -> None:
        text = self.make_advantage().describe()
        assert len(text.split()) >= 3
        assert text.endswith(".")
        needs = self.make_advantage().needs
        assert isinstance(needs, frozenset), f"`needs` is a frozenset of names, not {needs!r}"
        assert needs <= {field.name for field in fields(Turn)}, f"a turn has no field {sorted(needs)}"

    def test_every_response_token_gets_a_finite_float32(self) -> None:
        assert list(self.make_advantage().advantages([])) == []
        for turn in turns_of(self.make_advantage().advantages(self.groups())):
            for name in _WRITTEN:
                values = getattr(turn, name)
                assert values is not None or name != "advantages"
                if values is not None:
                    assert (values.dtype, values.shape) == (np.float32, turn.response_ids.shape)
                    assert np.isfinite(values).all()

    def test_all_else_stays_as_it_was_and_where_it_was(self) -> None:
        groups, untouched = self.groups(), self.groups()
        result = self.make_advantage().advantages(groups)
        for group, expected in zip(result, groups, strict=True):
            assert (group.uid, group.draw) == (expected.uid, expected.draw)
            names, wanted = ([(t.uid, t.sample, len(t.turns)) for t in one.trajectories] for one in (group, expected))
            assert names == wanted
        for before, given, after in zip(turns_of(untouched), turns_of(groups), turns_of(result), strict=True):
            assert _same(before, given, [field.name for field in fields(Turn)]), "the groups passed in were changed"
            assert _same(before, after, [field.name for field in fields(Turn) if field.name not in _WRITTEN])

    def test_order_of_groups_and_samples_does_not_matter(self) -> None:
        groups = self.groups()
        turned = [replace(group, trajectories=group.trajectories[::-1]) for group in groups[::-1]]
        result = self.make_advantage().advantages(turned)
        result = [replace(group, trajectories=group.trajectories[::-1]) for group in result][::-1]
        for one, other in zip(turns_of(self.make_advantage().advantages(groups)), turns_of(result), strict=True):
            np.testing.assert_allclose(_advantages(one), _advantages(other), rtol=1e-5, atol=1e-6)

    def test_numbers_per_sample_are_those_that_its_turns_get(self) -> None:
        advantage, groups = self.make_advantage(), self.groups()
        samples = advantage.sample_advantages(groups) if isinstance(advantage, ComparesSamples) else None
        if samples is None:
            pytest.skip("its advantages are computed token by token")
        for group, values in zip(advantage.advantages(groups), samples, strict=True):
            for trajectory, value in zip(group.trajectories, values.tolist(), strict=True):
                for turn in trajectory.turns:
                    assert _advantages(turn).tolist() == [np.float32(value)] * len(turn.response_ids)

    def test_a_better_sample_never_has_the_lower_advantage(self) -> None:
        for group in self.make_advantage().advantages(_one_token_groups(self.carry)):
            rewards = np.array([_advantages(t.turns[0])[0] for t in group.trajectories])
            assert (np.diff(rewards) >= 0).all(), rewards

    def test_group_with_equal_rewards_has_advantage_zero(self) -> None:
        if not self.compares_samples:
            return
        first, *others = self.groups()
        copies = tuple(replace(first.trajectories[0], sample=sample) for sample in range(3))
        result = self.make_advantage().advantages([replace(first, trajectories=copies), *others])
        assert all(not _advantages(turn).any() for turn in turns_of(result[:1]))
        assert any(_advantages(turn).any() for turn in turns_of(result[1:]))


def _one_token_groups(carry: Sequence[str]) -> list[Group]:
    """Return two groups of one-token samples with rewards in ascending order, critic values 0 and `carry` columns 1."""

    def sample(uid: str, number: int, reward: float) -> Trajectory:
        array = np.array([reward], dtype=np.float32)
        token = np.ones(1, dtype=np.int32)
        return Trajectory(uid, number, (Turn(token, token, np.ones(1, np.uint8), rewards=array, values=0 * array),))

    rewards = {"a": (0.0, 0.25, 1.0), "b": (0.5, 0.5, 0.75)}
    return [
        Group(
            uid,
            draw,
            tuple(sample(uid, number, reward) for number, reward in enumerate(rewards[uid])),
            dict.fromkeys(carry, 1.0),
        )
        for draw, uid in enumerate(rewards)
    ]


def _advantages(turn: Turn) -> np.ndarray:
    assert turn.advantages is not None
    return turn.advantages


def _same(one: Turn, other: Turn, names: Sequence[str]) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
