"""A batch has the bits that its records have, whether groups are flat or not, and whoever lays out and compares."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from preparation_oracle import FakeBackend, batch_of_records, make_groups

from spurline.errors import PluginError
from spurline.protocols.collator import ParallelLayout
from spurline.testing.samples import PAD
from spurline_collation_fast.collators import FastRolloutsCollator
from spurline_rl.advantages.algorithms import DrGrpo, Grpo, ReinforcePlusPlus, Rloo
from spurline_rl.advantages.configs import DrGrpoConfig, GrpoConfig, ReinforcePlusPlusConfig, RlooConfig
from spurline_rl.configs import RolloutsCollatorConfig, RolloutSourceConfig
from spurline_rl.losses.configs import PpoConfig
from spurline_rl.preparation import Preparation
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig
from spurline_rl.rollout_batches import RolloutsCollator
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.training_configs import ByPromptConfig

RANKS = 3


ADVANTAGES = (
    Grpo(GrpoConfig()),
    DrGrpo(DrGrpoConfig()),
    ReinforcePlusPlus(ReinforcePlusPlusConfig()),
    ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline="batch", gamma=0.9)),
    Rloo(RlooConfig()),
)


def make_preparation(collator: Any, advantage: Any, per_step: int, per_minibatch: int, **source: Any) -> Preparation:
    layout = ParallelLayout(data=RANKS)
    loss = SimpleNamespace(needs=frozenset())
    made = {"collator": collator(RolloutsCollatorConfig(), PAD, layout), "advantage": advantage, "loss": loss}
    config = RolloutSourceConfig(
        environment=EnvironmentConfig(name="any"),
        engine=RolloutEngineConfig(name="any"),
        prompts_per_step=per_step,
        samples_per_prompt=2,
        advantage=GrpoConfig(),
        **source,
    )
    minibatches = ByPromptConfig(prompts_per_minibatch=per_minibatch)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(collator=RolloutsCollatorConfig(), loss=PpoConfig(), minibatches=minibatches),
        host=SimpleNamespace(registry=SimpleNamespace(create=lambda kind, *_, **__: made[kind])),
        layout=layout,
        tokenizer=SimpleNamespace(pad_token_id=PAD),
    )
    return Preparation(config, context)


@given(
    prompts=st.integers(1, 4),
    samples=st.integers(2, 3),
    per_minibatch=st.integers(1, 2),
    seed=st.integers(0, 99),
    advantage=st.sampled_from(ADVANTAGES),
    collator=st.sampled_from([RolloutsCollator, FastRolloutsCollator]),
    turns=st.sampled_from(["separate", "merged"]),
    scope=st.sampled_from(["batch", "minibatch"]),
    ready=st.lists(st.booleans(), min_size=4, max_size=4),
    carry=st.lists(st.sampled_from(["weight", "hardness"]), unique=True),
)
@settings(max_examples=60)
def test_columns_are_those_of_the_records_bit_for_bit(
    prompts: int,
    samples: int,
    per_minibatch: int,
    seed: int,
    advantage: Any,
    collator: Any,
    turns: Any,
    scope: Any,
    ready: list[bool],
    carry: list[str],
) -> None:
    numbers = [{name: seed / 7 + len(name) * draw for name in carry} for draw in range(prompts)]
    groups = [replace(group, columns=numbers[group.draw]) for group in make_groups(prompts, samples, seed)]
    per_minibatch = min(per_minibatch, prompts)
    preparation = make_preparation(
        collator, advantage, prompts, per_minibatch, turns=turns, advantage_scope=scope, carry=tuple(carry)
    )
    given_groups = [preparation.ready(group) if ready[group.draw] else group for group in groups]
    backend: Any = FakeBackend(RANKS)
    batch = preparation.prepare(given_groups, backend)
    size = per_minibatch if scope == "minibatch" else prompts
    expected = batch_of_records(groups, advantage, scope=size, merged=turns == "merged", carry=carry)
    assert set(batch.tokens) == {*expected.tokens, "old_logprobs"}
    for name, column in expected.tokens.items():
        assert batch.tokens[name].dtype == column.dtype, name
        assert torch.equal(batch.tokens[name], column), name
    for name, column in expected.segments.items():
        assert batch.segments[name].values.tolist() == column.values.tolist(), name
        assert batch.segments[name].offsets.tolist() == column.offsets.tolist(), name
    trained = expected.tokens["advantages"][expected.tokens["loss_weights"] != 0].double()
    assert batch.info["advantage/mean"] == pytest.approx(float(trained.mean()), abs=1e-9)


@pytest.mark.parametrize("odd", [{}, {"advantages": 3}, {"advantages": 0, "loss_weights": 0}])
def test_an_advantage_with_other_columns_or_lengths_is_named(odd: dict[str, int]) -> None:
    """odd: how many values too many each returned column has."""

    class Odd(Grpo):
        def advantages(self, scored: ScoredGroups) -> dict[str, Any]:
            count = int(scored.attempt_tokens.sum())
            return {name: np.zeros(count + more, np.float32) for name, more in odd.items()}

    preparation = make_preparation(FastRolloutsCollator, Odd(GrpoConfig()), 2, 1)
    with pytest.raises(PluginError, match=r"^Odd\.advantages returned \{.*each of the \d+ response tokens"):
        preparation.prepare(make_groups(2, 3, seed=1), cast("Any", FakeBackend(RANKS)))
