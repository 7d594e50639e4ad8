"""Advantages against plain loops, and what each refuses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spurline import load_config
from spurline.errors import ConfigError, DataError
from spurline_rl.advantages.algorithms import DrGrpo, Gae, Grpo, MaxRl, ReinforcePlusPlus, Rloo
from spurline_rl.advantages.configs import (
    DrGrpoConfig,
    GaeConfig,
    GrpoConfig,
    MaxRlConfig,
    ReinforcePlusPlusConfig,
    RlooConfig,
)
from spurline_rl.protocols.advantage import Advantage
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.testing.advantage_contract import AdvantageContract, by_attempt, with_values
from spurline_rl.trajectory import Group, Trajectory, Turn

ADVANTAGES: dict[str, Advantage] = {
    "grpo": Grpo(GrpoConfig()),
    "grpo without std": Grpo(GrpoConfig(normalize_std=False)),
    "dr_grpo": DrGrpo(DrGrpoConfig()),
    "rloo": Rloo(RlooConfig()),
    "maxrl": MaxRl(MaxRlConfig()),
    "reinforce_pp": ReinforcePlusPlus(ReinforcePlusPlusConfig()),
    "reinforce_pp of tokens": ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline="batch", gamma=0.9)),
    "gae": Gae(GaeConfig(gamma=0.98)),
}
RELATIVE = ("dr_grpo", "grpo", "maxrl", "rloo")


class TestAdvantages(AdvantageContract):
    @pytest.fixture(autouse=True, params=sorted(ADVANTAGES))
    def _each(self, request: pytest.FixtureRequest) -> None:
        self._advantage = ADVANTAGES[request.param]
        self.compares_samples = request.param not in ("reinforce_pp of tokens", "gae")

    def make_advantage(self) -> Advantage:
        return self._advantage


FLOATS = st.floats(0, 4, width=32).map(lambda value: round(value, 3))


@st.composite
def scored_groups(draw: st.DrawFn) -> list[Group]:
    """1 to 4 groups of 2 to 5 samples with 1 to 3 turns of 0 to 4 tokens; any token may be rewarded."""
    groups = []
    for number in range(draw(st.integers(1, 4))):
        uid = f"prompt-{number}"
        trajectories = []
        for sample in range(draw(st.integers(2, 5))):
            lengths = [*draw(st.lists(st.integers(0, 4), max_size=2)), draw(st.integers(1, 4))]
            trajectories.append(Trajectory(uid, sample, tuple(draw(turns(length)) for length in lengths)))
        groups.append(Group(uid, number, tuple(trajectories)))
    return groups


@st.composite
def turns(draw: st.DrawFn, length: int) -> Turn:
    def floats() -> np.ndarray:
        return np.array([draw(FLOATS) for _ in range(length)], dtype=np.float32)

    mask = np.array([draw(st.integers(0, 3)) > 0 for _ in range(length)], dtype=np.uint8)
    tokens = np.ones(length, dtype=np.int32)
    return Turn(tokens[:0], tokens, mask, rewards=floats(), logprobs=floats())


def computed(advantage: Advantage, groups: Sequence[Group], name: str = "advantages") -> list[np.ndarray]:
    """A column that the advantage computes, for each attempt."""
    scored = with_values(groups)
    return by_attempt(scored, advantage.advantages(scored)[name])


def plain_return(trajectory: Trajectory) -> float:
    return sum(float(reward) for turn in trajectory.turns for reward in field(turn, "rewards"))


def field(turn: Turn, name: str) -> list[float]:
    return getattr(turn, name).tolist()


def plain_relative(name: str, returns: list[float], position: int) -> float:
    mean, own = statistics.fmean(returns), returns[position]
    if max(returns) - min(returns) <= 1e-6 * max(map(abs, returns)):
        return 0.0
    if name == "grpo":
        return (own - mean) / (statistics.stdev(returns) + 1e-6)
    if name == "dr_grpo":
        return own - mean
    if name == "rloo":
        return own - statistics.fmean(returns[:position] + returns[position + 1 :])
    assert name == "maxrl"
    return (own - mean) / (mean + 1e-6)


@pytest.mark.parametrize("name", RELATIVE)
@given(groups=scored_groups())
@settings(max_examples=40)
def test_group_relative_advantages_are_their_formulas(name: str, groups: list[Group]) -> None:
    found = iter(computed(ADVANTAGES[name], groups))
    for group in groups:
        returns = [plain_return(trajectory) for trajectory in group.trajectories]
        for position in range(len(returns)):
            np.testing.assert_allclose(next(found), plain_relative(name, returns, position), rtol=2e-5, atol=1e-6)


@given(groups=scored_groups())
@settings(max_examples=40)
def test_reinforce_pp_divides_centred_returns_by_their_spread_over_all_samples(groups: list[Group]) -> None:
    centred = []
    for group in groups:
        returns = [plain_return(trajectory) for trajectory in group.trajectories]
        centred.append([plain_relative("dr_grpo", returns, position) for position in range(len(returns))])
    spread = statistics.pstdev([value for values in centred for value in values])
    result = computed(ReinforcePlusPlus(ReinforcePlusPlusConfig()), groups)
    for value, found in zip([value for values in centred for value in values], result, strict=True):
        np.testing.assert_allclose(found, value / (spread + 1e-8), rtol=2e-5, atol=1e-6)


def plain_discounted(rewards: list[float], factor: float) -> list[float]:
    return [sum(factor**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))]


def joined(trajectory: Trajectory, name: str) -> list[float]:
    return [value for turn in trajectory.turns for value in field(turn, name)]


def plain_whitened(sequences: list[list[float]], masks: list[list[float]]) -> list[list[float]]:
    counted = [v for values, mask in zip(sequences, masks, strict=True) for v, m in zip(values, mask, strict=True) if m]
    if not counted:
        return sequences
    mean, spread = statistics.fmean(counted), statistics.pstdev(counted)
    return [[(value - mean) / (spread + 1e-8) for value in values] for values in sequences]


def all_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


@given(groups=scored_groups(), gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
@settings(max_examples=40)
def test_reinforce_pp_over_the_batch_whitens_discounted_returns(groups: list[Group], gamma: float) -> None:
    returns = [plain_discounted(joined(trajectory, "rewards"), gamma) for trajectory in all_trajectories(groups)]
    masks = [joined(trajectory, "loss_mask") for trajectory in all_trajectories(groups)]
    counted = np.concatenate(returns)[np.concatenate(masks) != 0]
    # Dividing rounding errors by a spread that consists of them is no comparison.
    assume(len(counted) == 0 or np.ptp(counted) > 1e-3)
    result = computed(ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline="batch", gamma=gamma)), groups)
    for values, found in zip(plain_whitened(returns, masks), result, strict=True):
        np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-5)


@given(groups=scored_groups(), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
@settings(max_examples=60)
def test_gae_is_the_decayed_sum_of_temporal_differences(groups: list[Group], gamma: float, lam: float) -> None:
    advantage = Gae(GaeConfig(gamma=gamma, lam=lam, normalize=False))
    result = zip(computed(advantage, groups), computed(advantage, groups, "returns"), strict=True)
    for before, (advantages, targets) in zip(all_trajectories(groups), result, strict=True):
        rewards, values = joined(before, "rewards"), joined(before, "logprobs")
        differences = [r + gamma * v1 - v0 for r, v0, v1 in zip(rewards, values, [*values[1:], 0.0], strict=True)]
        expected = plain_discounted(differences, gamma * lam)
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(targets, np.add(expected, values), rtol=1e-5, atol=1e-5)


def test_gae_normalises_the_trained_tokens_and_leaves_the_returns_alone() -> None:
    groups = AdvantageContract().groups(seed=3)
    plain, normalized = Gae(GaeConfig(normalize=False)), Gae(GaeConfig())
    masks = [joined(trajectory, "loss_mask") for trajectory in all_trajectories(groups)]
    expected = plain_whitened([values.tolist() for values in computed(plain, groups)], masks)
    for values, found in zip(expected, computed(normalized, groups), strict=True):
        np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-5)
    before, after = (np.concatenate(computed(advantage, groups, "returns")) for advantage in (plain, normalized))
    assert before.tolist() == after.tolist()


def test_gae_without_a_critic_says_what_is_missing() -> None:
    with pytest.raises(DataError, match=r"Turn 0 of sample 0 of prompt 'prompt-0' has no values\. Choose"):
        Gae(GaeConfig()).advantages(ScoredGroups(AdvantageContract().groups()))


@pytest.mark.parametrize("name", [*RELATIVE, "reinforce_pp"])
def test_group_of_one_is_refused_with_the_reason_and_the_way_out(name: str) -> None:
    (group, *_) = AdvantageContract().groups()
    alone = replace(group, trajectories=group.trajectories[:1])
    with pytest.raises(DataError, match=rf"prompt 'prompt-0' has 1 sample\(s\), but {name} compares .* Set source\."):
        computed(ADVANTAGES[name], [alone])


def test_maxrl_refuses_negative_returns() -> None:
    (group, *_) = AdvantageContract().groups()
    last = group.trajectories[0].turns[-1]
    worse = replace(last, rewards=np.full(len(last.response_ids), -9.0, np.float32))
    changed = replace(group.trajectories[0], turns=(worse,))
    with pytest.raises(DataError, match=r"prompt 'prompt-0' has return -\d+, but for maxrl the mean return"):
        computed(MaxRl(MaxRlConfig()), [replace(group, trajectories=(changed, *group.trajectories[1:]))])


def load(config: Any, **source: Any) -> object:
    source = {"environment": {"rewards": "exact_match"}, "advantage": config.model_dump(), **source}
    run = {
        "model": {"path": "m"},
        "data": {"train": "rows.jsonl"},
        "steps": 1,
        "source": {"name": "rollouts", **source},
    }
    return load_config({**run, "critic": {}} if config.uses_critic else run)


@pytest.mark.parametrize(
    ("config", "accepted"),
    [
        (GrpoConfig(), False),
        (RlooConfig(), False),
        (ReinforcePlusPlusConfig(), False),
        (ReinforcePlusPlusConfig(baseline="batch"), True),
        (GaeConfig(), True),
    ],
)
def test_config_check_knows_how_many_samples_an_advantage_needs(config: Any, accepted: bool) -> None:
    assert load(config, samples_per_prompt=2)
    if accepted:
        assert load(config, samples_per_prompt=1)
        return
    with pytest.raises(ConfigError, match=r"samples_per_prompt is 1\."):
        load(config, samples_per_prompt=1)


@pytest.mark.parametrize("config", [GrpoConfig(), MaxRlConfig()])
def test_kl_in_the_reward_is_refused_for_advantages_in_units_of_the_group(config: Any) -> None:
    with pytest.raises(ConfigError) as error:
        load(config, kl_in_reward={"coefficient": 0.01})
    [problem] = error.value.problems
    assert problem.key == "source.advantage.name"
    for fix in ("loss.kl.coefficient", "normalize_std: false", "dr_grpo", "rloo", "gae"):
        assert fix in problem.message
    for other in (
        GrpoConfig(normalize_std=False),
        DrGrpoConfig(),
        RlooConfig(),
        GaeConfig(),
        ReinforcePlusPlusConfig(),
    ):
        assert load(other, kl_in_reward={"coefficient": 0.01})
