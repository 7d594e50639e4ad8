"""Orders of parts in shares, and prompts that are drawn again until they are solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spurline.errors import ConfigError
from spurline.protocols.order import SampleFacts
from spurline.testing.order_contract import PositionsContract
from spurline_curricula.configs import MixtureConfig, ReplayConfig, SuccessMixtureConfig
from spurline_curricula.mixture import MixtureOrder
from spurline_curricula.parts import Parts, divide
from spurline_curricula.success_mixture import SuccessMixtureOrder
from spurline_rl.protocols.adaptive_order import ScoredDraw
from spurline_rl.testing import AdaptiveOrderContract


class TestMixture(PositionsContract):
    def make_order(self, samples: SampleFacts, seed: int) -> MixtureOrder:
        return MixtureOrder(MixtureConfig(column="difficulty"), samples=samples, seed=seed)


class TestSuccessMixture(AdaptiveOrderContract):
    def make_order(self, samples: SampleFacts, seed: int) -> SuccessMixtureOrder:
        replay = ReplayConfig(share=0.5, solved_at=0.5, most_times=2, most_prompts=3)
        config = SuccessMixtureConfig(column="difficulty", memory=4, replay=replay)
        return SuccessMixtureOrder(config, samples=samples, seed=seed)


class Columns:
    """The column `part` of rows in memory."""

    def __init__(self, parts: Sequence[str | None]) -> None:
        self.parts = parts

    def values(self, name: str) -> Sequence[Any]:
        assert name == "part"
        return self.parts

    numbers: Any = None
    location: Any = None


def facts(parts: Sequence[str | None], per_step: int = 8, weight: float = 1.0) -> SampleFacts:
    return SampleFacts((len(parts),), (weight,), per_step, Columns(parts))


names = st.lists(st.sampled_from("abc"), min_size=1, max_size=60)


@given(parts=names, share=st.floats(0, 0.9), weight=st.sampled_from([0.5, 1.0, 2.0]), seed=st.integers(0, 9))
def test_a_mixture_holds_its_shares_in_each_epoch_and_sees_all_rows_of_a_part_equally_often(
    parts: list[str], share: float, weight: float, seed: int
) -> None:
    samples = facts(parts, weight=weight)
    shares = {parts[0]: 1.0 if set(parts) == {parts[0]} else share}
    if 0 < shares[parts[0]] * samples.samples_per_epoch < 0.3:
        with pytest.raises(ConfigError, match="which is no sample in an epoch"):
            MixtureOrder(MixtureConfig(column="part", shares=shares), samples=samples, seed=seed)
        return
    assume(shares[parts[0]] == 0 or shares[parts[0]] * samples.samples_per_epoch >= 1)
    order = MixtureOrder(MixtureConfig(column="part", shares=shares), samples=samples, seed=seed)
    size, counts = samples.samples_per_epoch, np.zeros(len(parts), np.int64)
    for epoch in range(4):
        drawn = order.positions(epoch * size, (epoch + 1) * size)
        own = sum(parts[sample] == parts[0] for sample in drawn.tolist())
        assert abs(own - shares[parts[0]] * size) < 1
        assert own or not shares[parts[0]]
        counts += np.bincount(drawn, minlength=len(parts))
        for part in set(parts):
            assert np.ptp(counts[np.array(parts) == part]) <= 1


@given(
    wanted=st.lists(st.floats(-5, 40), min_size=1, max_size=6),
    room=st.lists(st.integers(0, 30), min_size=6, max_size=6),
    count=st.integers(0, 200),
)
def test_whole_numbers_have_the_sum_and_stay_within_the_room(wanted: list[float], room: list[int], count: int) -> None:
    limits = np.array(room[: len(wanted)])
    counts = divide(min(count, int(limits.sum())), np.array(wanted), limits)
    assert counts.sum() == min(count, limits.sum())
    assert (counts >= 0).all()
    assert (counts <= limits).all()


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ({"matth": 0.5}, "shares.matth is a share of rows with part: matth, and there are none. Did you mean"),
        ({"math": 1.0}, "leaves nothing for other values of part: code"),
        ({"math": 0.5, "code": 0.2}, "has the sum 0.7, but every part has a share. Make it 1."),
    ],
)
def test_shares_that_fit_no_parts_are_refused(shares: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Parts.of(facts(["math", "code"]), MixtureConfig(column="part", shares=shares))


def success_order(parts: Sequence[str | None], per_step: int = 8, **settings: Any) -> SuccessMixtureOrder:
    config = SuccessMixtureConfig(column="part", **settings)
    return SuccessMixtureOrder(config, samples=facts(parts, per_step), seed=0)


def run(
    order: SuccessMixtureOrder, rewards: Callable[[int, int], Sequence[float]], steps: int, size: int = 8
) -> list[list[int]]:
    """Draw and observe these steps. `rewards` gets a sample and how often it was drawn before."""
    seen, drawn = Counter[int](), list[list[int]]()
    for step in range(steps):
        block = order.positions(step * size, (step + 1) * size).tolist()
        scores = [tuple(rewards(sample, seen[sample])) for sample in block]
        draws = [ScoredDraw(step * size + at, block[at], scores[at], {}) for at in range(size)]
        order.observe(step + 1, draws)
        seen.update(block)
        drawn.append(block)
    return drawn


def test_parts_that_are_sometimes_solved_come_more_often_although_no_prompt_came_before() -> None:
    rewards = {"easy": (1.0, 1.0), "half": (0.0, 1.0), "never": (0.0, 0.0)}
    parts = ["easy", "half", "never"] * 2000
    order = success_order(parts, memory=16)
    drawn = run(order, lambda sample, _: rewards[parts[sample]], 60)
    assert max(Counter(sample for block in drawn for sample in block).values()) == 1
    late = Counter(parts[sample] for block in drawn[10:] for sample in block)
    # The weights are 0.1, 1 and 0.1.
    assert late["half"] == pytest.approx(400 / 1.2, abs=3)
    assert abs(late["easy"] - late["never"]) <= 2
    assert order.metrics()["order/weight/half"] == pytest.approx(1 / 1.2)
    assert order.metrics()["order/success/never"] == 0


def test_unsolved_prompts_come_again_until_they_are_solved_or_were_drawn_too_often() -> None:
    # Prompt 0 is solved at its third draw, prompt 1 never.
    order = success_order(["a"] * 400, replay={"share": 0.25, "most_times": 3})
    drawn = run(order, lambda sample, before: (float((sample != 0 or before >= 2) and sample != 1),), 50)
    counts = Counter(sample for block in drawn for sample in block)
    assert (counts[0], counts[1]) == (3, 4)
    assert sorted(counts)[2:] == sorted(sample for sample in counts if sample > 1)
    assert all(counts[sample] == 1 for sample in counts if sample > 1)
    told = order.metrics()
    found = {name: told[f"order/replay/{name}"] for name in ("replayed", "solved", "given_up", "waiting")}
    assert found == {"replayed": 5, "solved": 1, "given_up": 1, "waiting": 0}
    assert all(len(set(block)) == len(block) for block in drawn)


def test_waiting_prompts_are_bounded_in_number_and_in_their_share_of_a_step() -> None:
    order = success_order(["a"] * 300, replay={"share": 0.5, "most_times": 9, "most_prompts": 5})
    drawn = run(order, lambda *_: (0.0,), 30)
    seen: set[int] = set()
    for block in drawn[1:]:
        seen |= set(drawn[0])
        assert sum(sample in seen for sample in block) <= 4
        seen |= set(block)
    assert order.metrics()["order/replay/waiting"] <= 5
    assert order.metrics()["order/replay/given_up"] > 0


def test_rows_that_cannot_be_read_and_parts_with_the_share_zero_are_never_drawn() -> None:
    parts = ["a", None, "b", "a", "c"] * 5
    drawn = run(success_order(parts, shares={"b": 0}), lambda *_: (1.0,), 20)
    assert {parts[sample] for block in drawn for sample in block} == {"a", "c"}
    mixture = MixtureOrder(MixtureConfig(column="part", shares={"b": 0}), samples=facts(parts), seed=0)
    assert {parts[sample] for sample in mixture.positions(0, 100).tolist()} == {"a", "c"}
