"""Advantages from reward terms and from turns, against their formulas and the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spurline.errors import DataError
from spurline_objectives.advantages import Gdpo, TurnGrpo
from spurline_objectives.configs import GdpoConfig, TurnGrpoConfig
from spurline_rl.advantages.algorithms import Grpo
from spurline_rl.advantages.configs import GrpoConfig
from spurline_rl.protocols.advantage import Advantage
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.scoring import score
from spurline_rl.testing import AdvantageContract
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import Group, has_equal_returns

EPS = 1e-6


class TestGdpo(AdvantageContract):
    def make_advantage(self) -> Advantage:
        return Gdpo(GdpoConfig())


class TestTurnGrpo(AdvantageContract):
    # Equal returns may come from other turns.
    compares_samples = False

    def make_advantage(self) -> Advantage:
        return TurnGrpo(TurnGrpoConfig())


def group_of(uid: str, turn_rewards: list[list[float]], **terms: list[float]) -> Group:
    """Return a group whose attempts have these rewards of turns and these terms."""
    made = make_trajectories([[(2, 1 + number) for number in range(len(rewards))] for rewards in turn_rewards], 0)
    attempts: list[Any] = []
    for sample, (attempt, given) in enumerate(zip(made, turn_rewards, strict=True)):
        turns = [replace(turn, rewards=np.eye(1, len(turn.response_ids), dtype=np.float32)[0][::-1] * reward)
                 for turn, reward in zip(attempt.turns, given, strict=True)]  # fmt: skip
        rewards = {name: values[sample] for name, values in terms.items()}
        attempts.append(score(replace(attempt, uid=uid, sample=sample, turns=tuple(turns), rewards=rewards), {}))
    return Group(uid, 0, tuple(attempts))


def z(values: list[float]) -> np.ndarray:
    array = np.array(values)
    return (array - array.mean()) / (array.std(ddof=1) + EPS)


def of_attempts(groups: list[Group], advantage: Advantage) -> list[np.ndarray]:
    """Return the advantages of all tokens of each attempt."""
    scored = ScoredGroups(groups)
    found = advantage.advantages(scored)["advantages"]
    return np.split(found, np.cumsum(scored.attempt_tokens)[:-1])


def test_each_term_is_normalised_by_itself_and_the_sum_over_all_samples() -> None:
    right, short = [1.0, 0.0, 1.0, 0.0], [0.0, 0.1, 0.1, 0.0]
    groups = [
        group_of("a", [[0.0]] * 4, right=right, short=short),
        group_of("b", [[0.0]] * 2, right=[1.0, 0.0], short=[0.5, 0.5]),
    ]
    found = of_attempts(groups, Gdpo(GdpoConfig(weights={"short": 0.5})))
    sums = np.concatenate([z(right) + 0.5 * z(short), z([1.0, 0.0])])
    expected = sums / (sums.std() + EPS)
    np.testing.assert_allclose([each[0] for each in found], expected, rtol=1e-6)
    assert found[0][0] != pytest.approx(-found[3][0]), "GRPO would treat these samples as mirror images"


def test_samples_with_other_terms_and_one_sum_have_other_advantages() -> None:
    group = group_of("a", [[0.0]] * 3, right=[1.0, 0.0, 0.0], short=[0.0, 1.0, 2.0])
    grpo, gdpo = (
        [float(each[0]) for each in of_attempts([group], made)] for made in (Grpo(GrpoConfig()), Gdpo(GdpoConfig()))
    )
    assert grpo[0] == grpo[1]
    assert len({round(value, 3) for value in gdpo}) == 3


def test_rewards_of_turns_are_one_more_term() -> None:
    right, earned = [1.0, 0.0, 0.0], [[0.0, 0.5], [2.0, 0.0], [0.0, 0.0]]
    found = of_attempts([group_of("a", earned, right=right)], Gdpo(GdpoConfig(normalize_batch=False)))
    np.testing.assert_allclose([each[0] for each in found], z(right) + z([0.5, 2.0, 0.0]), rtol=1e-5)


def test_a_weight_of_a_term_that_does_not_exist_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(DataError, match=r"advantage\.weights\.rigth: .* Did you mean 'right'"):
        of_attempts([group_of("a", [[0.0]] * 2, right=[1.0, 0.0])], Gdpo(GdpoConfig(weights={"rigth": 1.0})))


def test_a_weight_of_a_term_of_another_environment_has_no_effect() -> None:
    group = group_of("a", [[0.0]] * 2, right=[1.0, 0.0])
    labelled = [replace(each, info={"environment": "math"}) for each in group.trajectories]
    group = replace(group, trajectories=tuple(labelled))
    weighted, plain = (of_attempts([group], Gdpo(GdpoConfig(weights=each))) for each in ({"brief": 0.5}, {}))
    np.testing.assert_array_equal(weighted, plain)


@pytest.mark.parametrize("made", [Gdpo(GdpoConfig()), TurnGrpo(TurnGrpoConfig())])
def test_groups_with_equal_returns_teach(made: Advantage) -> None:
    """This is why `zero_variance: refill` is refused."""
    terms = {"right": [0.0, 1.0, 2.0], "brief": [2.0, 1.5, 0.0], "formed": [0.0, -0.5, 0.0]}
    group = group_of("a", [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], **terms)
    assert has_equal_returns(group)
    assert np.abs(np.concatenate(of_attempts([group], made))).max() > 0.5


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_turn_is_compared_with_the_same_turn_of_other_samples(gamma: float) -> None:
    earned = [[1.0, 0.0, 2.0], [0.0, 1.0], [0.0, 0.0]]
    found = of_attempts([group_of("a", earned, right=[0.0, 1.0, 0.0])], TurnGrpo(TurnGrpoConfig(gamma=gamma)))
    # The term belongs to the last turn.
    first = z([1.0 + gamma * gamma * 2.0, gamma * 2.0, 0.0])
    second = z([gamma * 2.0, 2.0, 0.0])
    expected = [[first[0]] + [second[0]] * 2 + [0.0] * 3, *([first[n]] + [second[n]] * 2 for n in (1, 2))]
    for tokens, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(tokens, wanted, rtol=1e-5, atol=1e-6)


def test_with_one_turn_it_is_grpo() -> None:
    groups = [group_of("a", [[0.0]] * 4, right=[1.0, 0.0, 1.0, 0.25]), group_of("b", [[0.0]] * 2, right=[1.0, 1.0])]
    turn, whole = (of_attempts(groups, made) for made in (TurnGrpo(TurnGrpoConfig()), Grpo(GrpoConfig())))
    for one, other in zip(turn, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
