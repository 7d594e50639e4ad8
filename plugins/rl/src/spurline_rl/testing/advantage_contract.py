"""Check that an advantage algorithm keeps its contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from spurline_rl.protocols.advantage import Advantage
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import RESPONSE_FIELDS, Group, Trajectory, Turn, turns_of, with_turns


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

    def computed(self, groups: Sequence[Group]) -> list[NDArray[np.float32]]:
        """Return the advantages of each attempt's response tokens."""
        scored = self.scored(groups)
        return by_attempt(scored, self.make_advantage().advantages(scored)["advantages"])

    def scored(self, groups: Sequence[Group]) -> ScoredGroups:
        """Return the groups with values of a critic, and with the logprobs of other models that the advantage needs."""
        scored = with_values(groups)
        needs = sorted(name for name in self.make_advantage().needs if name.endswith("_logprobs"))
        # Each model is as far from the critic's values as the length of its name.
        made = {name: scored.column("logprobs") * np.float32(1 + len(name) / 99) for name in needs}
        return replace(scored, computed={**scored.computed, **made})

    def test_it_describes_itself_and_the_columns_that_it_needs(self) -> None:
        text = self.make_advantage().describe()
        assert len(text.split()) >= 3
        assert text.endswith(".")
        needs = self.make_advantage().needs
        assert isinstance(needs, frozenset), f"`needs` is a frozenset of names, not {needs!r}"
        known = {*RESPONSE_FIELDS, "values", *(name for name in needs if name.endswith("_logprobs"))}
        assert needs <= known, f"response tokens have no {sorted(needs - known)}"

    def test_every_response_token_gets_a_finite_float32(self) -> None:
        assert len(self.make_advantage().advantages(self.scored([]))["advantages"]) == 0
        scored = self.scored(self.groups())
        columns = self.make_advantage().advantages(scored)
        assert {"advantages"} <= columns.keys() <= {"advantages", "returns"}
        for values in columns.values():
            assert (values.dtype, len(values)) == (np.float32, scored.attempt_tokens.sum())
            assert np.isfinite(values).all()

    def test_the_groups_are_not_changed(self) -> None:
        groups, untouched = self.groups(), self.groups()
        self.computed(groups)
        for before, after in zip(turns_of(untouched), turns_of(groups), strict=True):
            for field in fields(Turn):
                assert np.array_equal(getattr(before, field.name), getattr(after, field.name)), field.name

    def test_rewards_that_were_computed_for_the_batch_count(self) -> None:
        """KL in the reward gives such rewards."""
        groups = self.groups()
        sizes = [len(turn.response_ids) for turn in turns_of(groups)]
        rewards = np.random.default_rng(9).random(sum(sizes), np.float32)
        parts = zip(turns_of(groups), np.split(rewards, np.cumsum(sizes)[:-1]), strict=True)
        charged = with_turns(groups, [replace(turn, rewards=part) for turn, part in parts])
        scored = self.scored(groups)
        scored = replace(scored, computed={**scored.computed, "rewards": rewards})
        found = self.make_advantage().advantages(scored)["advantages"]
        np.testing.assert_array_equal(found, np.concatenate(self.computed(charged)))

    def test_order_of_groups_and_samples_does_not_matter(self) -> None:
        groups = self.groups()
        turned = [replace(group, trajectories=group.trajectories[::-1]) for group in groups[::-1]]
        for one, other in zip(self.computed(groups), self.computed(turned)[::-1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    def test_a_better_sample_never_has_the_lower_advantage(self) -> None:
        groups = _one_token_groups(self.carry)
        for advantages in np.split(np.concatenate(self.computed(groups)), len(groups)):
            assert (np.diff(advantages) >= 0).all(), advantages

    def test_group_with_equal_rewards_has_advantage_zero(self) -> None:
        if not self.compares_samples:
            return
        first, *others = self.groups()
        copies = tuple(replace(first.trajectories[0], sample=sample) for sample in range(3))
        result = self.computed([replace(first, trajectories=copies), *others])
        assert not np.concatenate(result[:3]).any()
        assert np.concatenate(result[3:]).any()


def with_values(groups: Sequence[Group]) -> ScoredGroups:
    """Return the groups with values of a critic, which are the logprobs of the turns."""
    return ScoredGroups(groups, {"values": ScoredGroups(groups).column("logprobs").copy()})


def by_attempt(scored: ScoredGroups, column: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Split a column [A] into the tokens of each attempt."""
    return np.split(column, np.cumsum(scored.attempt_tokens)[:-1])


def _one_token_groups(carry: Sequence[str]) -> list[Group]:
    """Return two groups of one-token samples with rewards in ascending order, critic values 0 and `carry` columns 1."""

    def sample(uid: str, number: int, reward: float) -> Trajectory:
        array = np.array([reward], dtype=np.float32)
        token = np.ones(1, dtype=np.int32)
        return Trajectory(uid, number, (Turn(token, token, np.ones(1, np.uint8), rewards=array, logprobs=0 * array),))

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
