"""Every column of a prepared batch is what plain numpy computes for it, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from preparation_oracle import CAP, EPS, GAMMA, LAM, FakeBackend, Oracle, make_groups, make_preparation

from spurline.data.batch import TrainingBatch
from spurline.protocols.minibatches import MiniBatchesConfig
from spurline.testing.samples import PAD, check_batch
from spurline_rl.advantages.configs import GaeConfig, ReinforcePlusPlusConfig, RlooConfig
from spurline_rl.configs import KlInRewardConfig, RolloutsCollatorConfig, RolloutSourceConfig, SamplingConfig
from spurline_rl.losses.configs import KlConfig, PpoConfig, TruncatedImportanceSamplingConfig
from spurline_rl.protocols.advantage import AdvantageConfig
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig
from spurline_rl.trajectory import Group

RANKS, PROMPTS, SAMPLES, PER_MINIBATCH = 3, 4, 3, 2
TEMPERATURE = 0.8
GAE = GaeConfig(gamma=GAMMA, lam=LAM, eps=EPS)


def prepare(
    advantage: AdvantageConfig,
    *,
    loss: PpoConfig | None = None,
    minibatches: MiniBatchesConfig | None = None,
    pad_side: Literal["left", "right"] = "right",
    groups: Sequence[Group] | None = None,
    **source: Any,
) -> tuple[TrainingBatch, FakeBackend]:
    config = RolloutSourceConfig(
        environment=EnvironmentConfig(name="any"),
        engine=RolloutEngineConfig(name="any"),
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
        advantage=advantage,
        correction=TruncatedImportanceSamplingConfig(cap=CAP),
        sampling=SamplingConfig(temperature=TEMPERATURE),
        **source,
    )
    run: dict[str, Any] = {"loss": loss or PpoConfig(), "collator": RolloutsCollatorConfig(pad_side=pad_side)}
    if minibatches is not None:
        run["minibatches"] = minibatches
    backend: Any = FakeBackend(RANKS)
    preparation = make_preparation(config, RANKS, **run)
    # Some were prepared when they were finished, and some were not: read from a recording, for one.
    given = make_groups(PROMPTS, SAMPLES) if groups is None else groups
    return preparation.prepare([preparation.ready(each) if each.draw % 2 else each for each in given], backend), backend


def assert_rows(batch: TrainingBatch, oracle: Oracle) -> None:
    check_batch(batch)
    expected = oracle.rows(make_groups(PROMPTS, SAMPLES))
    assert batch.num_rows == len(expected)
    assert len(expected) % RANKS != 0, "the case must need padding rows to tell anything"
    computed = set(batch.tokens) - {"segment_ids", "position_ids", "token_versions"}
    assert computed == set(expected[0])
    for row, columns in enumerate(expected):
        in_segment = batch.tokens["segment_ids"][row].numpy() > 0
        for name, values in columns.items():
            found = batch.tokens[name][row].numpy()
            np.testing.assert_allclose(found[in_segment], values, rtol=2e-5, atol=2e-6, err_msg=f"{name} of row {row}")
            nothing = {"input_ids": PAD, "correction_factors": 1}.get(name, 0)
            assert (found[~in_segment] == nothing).all(), f"{name} of row {row} is on padding"


@pytest.mark.parametrize("turns", ["separate", "merged"])
@pytest.mark.parametrize("scope", ["batch", "minibatch"])
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("pad_side", ["left", "right"])
def test_columns_with_a_critic_are_those_of_the_oracle(
    turns: str, scope: str, kl: float, pad_side: Literal["left", "right"]
) -> None:
    charge = KlInRewardConfig(coefficient=kl) if kl else None
    prepared, _ = prepare(GAE, pad_side=pad_side, turns=turns, advantage_scope=scope, kl_in_reward=charge)
    size = PROMPTS if scope == "batch" else PER_MINIBATCH
    assert_rows(prepared, Oracle(TEMPERATURE, kl, size, merged=turns == "merged", critic=True))


class ThreeAndRestConfig(MiniBatchesConfig):
    """As of a plugin: two mini-batches of three prompts and of what is left."""

    name: str = "three_and_rest"

    def minibatch_prompts(self, prompts_per_step: int) -> int:
        return 3


def test_the_scope_of_a_mini_batch_is_that_of_a_plugins_own_mini_batches() -> None:
    prepared, _ = prepare(GAE, minibatches=ThreeAndRestConfig(), advantage_scope="minibatch")
    assert_rows(prepared, Oracle(TEMPERATURE, 0.0, 3, merged=False, critic=True))


@pytest.mark.parametrize("turns", ["separate", "merged"])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_columns_without_a_critic_are_those_of_the_oracle(turns: str, kl: float) -> None:
    charge = KlInRewardConfig(coefficient=kl) if kl else None
    prepared, _ = prepare(RlooConfig(), turns=turns, kl_in_reward=charge)
    assert_rows(prepared, Oracle(TEMPERATURE, kl, 1, merged=turns == "merged", critic=False))


@pytest.mark.parametrize("scope", ["batch", "minibatch"])
@pytest.mark.parametrize(
    "advantage", [RlooConfig(), GAE, ReinforcePlusPlusConfig(), ReinforcePlusPlusConfig(baseline="batch")]
)
def test_attempts_that_do_not_count_are_compared_with_nothing_and_have_no_advantage(
    advantage: AdvantageConfig, scope: str
) -> None:
    counts = {0: (False, False, False), 1: (True, False, True), 2: (False, True, False), 3: (True, True, True)}
    flagged, kept = [], []
    for group in make_groups(PROMPTS, SAMPLES):
        attempts = [replace(each, counts=counts[group.draw][each.sample]) for each in group.trajectories]
        flagged.append(replace(group, trajectories=tuple(attempts)))
        counted = tuple(attempt for attempt in attempts if attempt.counts)
        if len(counted) >= advantage.smallest_group:
            kept.append(replace(group, trajectories=counted))
    cut_off = {"action": "mask", "in_baseline": False}
    found, _ = prepare(advantage, groups=flagged, cut_off=cut_off, advantage_scope=scope)
    size = PROMPTS if scope == "batch" else PER_MINIBATCH
    scopes = [[group for group in kept if group.draw // size == number] for number in range(PROMPTS // size)]

    def by_place(batch: TrainingBatch) -> dict[tuple[Any, ...], list[float]]:
        rows = batch.tokens["advantages"].numpy()
        names = zip(*(batch.segments[name].values.tolist() for name in ("uid", "sample", "turn")), strict=True)
        return {name: row[row != 0].tolist() for name, row in zip(names, rows, strict=True)}

    wanted = {
        place: values for groups in scopes for place, values in by_place(prepare(advantage, groups=groups)[0]).items()
    }
    for name, values in by_place(found).items():
        assert values == wanted.get(name, []), name


def test_only_models_that_the_recipe_needs_are_asked() -> None:
    def roles(advantage: AdvantageConfig, **settings: Any) -> set[str]:
        return {role for role, _ in prepare(advantage, **settings)[1].asked}

    assert roles(RlooConfig()) == {"policy"}
    assert roles(RlooConfig(), kl_in_reward=KlInRewardConfig(coefficient=0.1)) == {"policy", "reference"}
    assert roles(RlooConfig(), loss=PpoConfig(kl=KlConfig(coefficient=0.1))) == {"policy", "reference"}
    assert roles(GAE) == {"policy", "critic"}


def test_the_charged_kl_and_the_rewards_after_it_are_logged() -> None:
    prepared, _ = prepare(RlooConfig(), kl_in_reward=KlInRewardConfig(coefficient=0.3))
    rows = Oracle(TEMPERATURE, 0.3, 1, merged=False, critic=False).rows(make_groups(PROMPTS, SAMPLES))
    trained = [row["loss_weights"] != 0 for row in rows]
    kl = [(row["old_logprobs"] - row["reference_logprobs"])[where] for row, where in zip(rows, trained, strict=True)]
    info = prepared.info
    assert info["kl_reward/mean"] == pytest.approx(np.concatenate(kl).mean(), rel=1e-4)
    total = sum(row["rewards"].sum() for row in rows)
    assert info["reward/after_kl"] == pytest.approx(total / (PROMPTS * SAMPLES), rel=1e-4)
