"""Gradients of every loss with every reduction do not depend on rows, packing, padding, micro-batches or ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import Sample, excite, lay_out, local_backend, make_samples, write_model_folder
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spurline.config.run_config import CriticConfig
from spurline.data.batch import Ragged, TrainingBatch
from spurline.protocols.backend import Role
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import ENTROPY, Loss, Objective
from spurline.update.reduction import REDUCTIONS, Reduce, fixed_norm, reduce_corrected
from spurline_models.dealing import deal
from spurline_models.local.backend import LocalBackend
from spurline_models.losses.configs import CrossEntropyConfig, DynamicFineTuningConfig
from spurline_models.losses.cross_entropy import CrossEntropy, DynamicFineTuning
from spurline_models.optimizers.configs import AdamWConfig
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.losses import configs as losses_configs
from spurline_rl.losses.algorithms import Cispo, Gspo, PolicyGradient, Ppo, Sapo, ValueLoss
from spurline_rl.losses.configs import KlConfig
from spurline_rl.losses.corrections import MaskedImportanceSampling, TruncatedImportanceSampling, compare
from spurline_rl.preparation import TurnColumns
from spurline_rl.protocols.correction import Correction
from spurline_rl.rollout_batches import RolloutsCollator
from spurline_rl.testing.backend_cases import assert_gradients_close
from spurline_rl.training_configs import ByPromptConfig
from spurline_rl.trajectory import Group, Trajectory, Turn, merge_turns

TOLERANCES = {"fp64": 1e-10, "fp32": 3e-6}
EXAMPLES = 40 if os.environ.get("SPURLINE_SOAK") else 3
"""Of each loss with each reduction in each precision."""

# Both samples train only their second token, which attends to one token: queries and keys have no gradient.
SECOND_TOKENS_ALONE: dict[str, Any] = {
    "lengths": [2],
    "row_of": [0, 1] * 3,
    "gap": 0,
    "left": False,
    "seed": 0,
    "correction": "mis",
    "temperature": 1.0,
    "split": {},
    "ranks": 2,
}

EXTRAS: dict[str, Any] = {"kl": KlConfig(coefficient=0.1), "entropy_coefficient": 0.05}
LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(CrossEntropyConfig()),
    "dft": DynamicFineTuning(DynamicFineTuningConfig()),
    "policy_gradient": PolicyGradient(losses_configs.PolicyGradientConfig(importance_ratio=True)),
    "ppo": Ppo(losses_configs.PpoConfig(dual_clip=3.0, **EXTRAS)),
    "gspo": Gspo(losses_configs.GspoConfig(clip_low=0.1, clip_high=0.1)),
    "cispo": Cispo(losses_configs.CispoConfig(clip_high=0.3)),
    "sapo": Sapo(losses_configs.SapoConfig(**EXTRAS)),
    "value": ValueLoss(losses_configs.ValueLossConfig()),
}
TOKEN_LOSSES = sorted(LOSSES.keys() - {"gspo"})
REDUCE: dict[str, Reduce] = {**REDUCTIONS, "fixed_norm": fixed_norm(16)}
CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "tis": TruncatedImportanceSampling(losses_configs.TruncatedImportanceSamplingConfig(level="sequence", cap=1.2)),
    "tis of tokens": TruncatedImportanceSampling(losses_configs.TruncatedImportanceSamplingConfig()),
    "mis": MaskedImportanceSampling(losses_configs.MaskedImportanceSamplingConfig(low=0.7, high=1.5)),
}


@lru_cache(maxsize=1)
def model_folder() -> Path:
    return write_model_folder(Path(mkdtemp(prefix="spurline-tiny-")))


@lru_cache(maxsize=16)
def backend(precision: str, **settings: Any) -> LocalBackend:
    critic = CriticConfig(loss=losses_configs.ValueLossConfig(), minibatches=ByPromptConfig(), optimizer=AdamWConfig())
    made = excite(local_backend(model_folder(), run={"critic": critic}, precision=precision, **settings))
    assert made._critic is not None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made._critic.model.causal.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter), alpha=0.1 if min(parameter.shape) < 2 else 0.08)
    return made


Columns = list[dict[str, Tensor]]


def rl_columns(samples: list[Sample], seed: int) -> Columns:
    """For each sample: logprobs of three other models near the trained one, values near the critic's, and targets."""
    generator = torch.Generator().manual_seed(seed)
    batch = lay_out(samples)
    logprobs, values = backend("fp64").logprobs(batch), backend("fp64").logprobs(batch, "critic")
    near = {"old_logprobs": logprobs, "rollout_logprobs": logprobs, "reference_logprobs": logprobs, "values": values}
    columns: Columns = []
    for row, sample in enumerate(samples):
        count = len(sample.tokens)
        noisy = {name: own[row, :count] + 0.3 * torch.randn(count, generator=generator) for name, own in near.items()}
        advantages = torch.randn(1, generator=generator).expand(count)
        columns.append({**noisy, "advantages": advantages, "returns": torch.randn(count, generator=generator)})
    return columns


def laid_out(
    samples: list[Sample], columns: Columns, rows: list[list[int]] | None = None, **layout: Any
) -> TrainingBatch:
    batch = lay_out(samples, rows, **layout)
    rows = rows if rows is not None else [[number] for number in range(len(samples))]
    tokens = {name: torch.zeros(batch.num_rows, batch.length) for name in columns[0]}
    for row, members in enumerate(rows):
        for segment, number in enumerate(members, start=1):
            where = batch.tokens["segment_ids"][row] == segment
            for name, values in columns[number].items():
                tokens[name][row, where] = values
    return batch.with_tokens(**tokens)


def reduced(batch: TrainingBatch, reduction: str, correction: str) -> tuple[TrainingBatch, float]:
    component = CORRECTIONS[correction]
    if component is None:
        return REDUCE[reduction](batch)
    factors = compare(batch, component)[0].tokens["correction_factors"]
    return reduce_corrected(batch, factors, REDUCE[reduction])


def role_of(loss: str) -> Role:
    return "critic" if loss == "value" else "policy"


def rank_gradients(
    precision: str, batch: TrainingBatch, objective: Objective, role: Role, ranks: int, split: dict[str, Any]
) -> dict[str, Tensor]:
    """The sum over ranks of what each computes from its share of the rows, as an all-reduce would give it."""
    total: dict[str, Tensor] = {}
    for share in deal(batch, ranks, columns=objective.loss.needs - {ENTROPY}).shares:
        for name, gradient in backend(precision, **split).gradients(share.batch, objective, role=role):
            total[name] = total[name] + gradient if name in total else gradient.clone()
    return total


@pytest.mark.parametrize("precision", sorted(TOLERANCES))
@pytest.mark.parametrize("reduction", sorted(REDUCE))
@pytest.mark.parametrize("loss", sorted(LOSSES))
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=5),
    row_of=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    gap=st.integers(0, 2),
    left=st.booleans(),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    temperature=st.sampled_from([1.0, 0.7]),
    split=st.sampled_from([{}, {"rows_per_microbatch": 1}, {"max_tokens_per_microbatch": 20}]),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=EXAMPLES, database=None)
@example(**SECOND_TOKENS_ALONE)
def test_any_layout_split_and_number_of_ranks_gives_the_gradients_of_one_padded_batch(
    precision: str,
    loss: str,
    reduction: str,
    lengths: list[int],
    row_of: list[int],
    gap: int,
    left: bool,
    correction: str,
    temperature: float,
    split: dict[str, Any],
    ranks: int,
    seed: int,
) -> None:
    samples = make_samples([9, *lengths], seed, loss_share=1.1)
    columns = rl_columns(samples, seed)
    row_of = row_of[: len(samples)]
    rows = [[number for number in range(len(samples)) if row_of[number] == row] for row in sorted(set(row_of))]
    packed = laid_out(samples, columns, rows, gap=gap, left=left)

    plain, normalizer = reduced(laid_out(samples, columns), reduction, correction)
    objective, role = Objective(LOSSES[loss], normalizer, temperature), role_of(loss)
    expected = backend(precision).gradients(plain, objective, role=role)
    batch, packed_normalizer = reduced(packed, reduction, correction)
    assert packed_normalizer == pytest.approx(normalizer, rel=1e-12)
    objective = Objective(LOSSES[loss], packed_normalizer, temperature)
    got = rank_gradients(precision, batch, objective, role, ranks, split)
    assert_gradients_close(got, expected, TOLERANCES[precision], cancels_below=1e-3)


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
@pytest.mark.parametrize("reduction", ["token_mean", "fixed_norm"])
def test_one_merged_row_is_a_row_per_turn_for_losses_of_tokens(loss: str, reduction: str) -> None:
    # A prompt of 4 tokens, a turn of 3, a tool's answer of 2, a turn of 5; beside it a trajectory of one turn.
    (whole, other) = make_samples([14, 8], seed=4, loss_share=1.1)
    first, second = (0.0,) * 4 + (1.0,) * 3, (0.0,) * 9 + (1.0,) * 5
    merged = replace(whole, weights=tuple(a + b for a, b in zip((*first, *[0.0] * 7), second, strict=True)))
    turns = [replace(whole, tokens=whole.tokens[:7], weights=first), replace(whole, weights=second)]

    (of_merged, of_other) = rl_columns([merged, other], seed=4)
    of_first = {name: values[:7] for name, values in of_merged.items()}
    one_row = laid_out([merged, other], [of_merged, of_other])
    per_turn = laid_out([*turns, other], [of_first, of_merged, of_other])
    per_turn = replace(per_turn, segments={**per_turn.segments, "turn": Ragged.from_rows([[0], [1], [0]], np.int32)})

    batch, normalizer = REDUCE[reduction](one_row)
    role = role_of(loss)
    expected = backend("fp64").gradients(batch, Objective(LOSSES[loss], normalizer), role=role)
    batch, per_turn_normalizer = REDUCE[reduction](per_turn)
    assert per_turn_normalizer == normalizer
    got = backend("fp64").gradients(batch, Objective(LOSSES[loss], normalizer), role=role)
    assert_gradients_close(got, expected, 1e-10)


def attempt(sample: int, shapes: list[tuple[int, int]], goes_on: bool) -> Trajectory:
    """Turns of (tokens before the response, response tokens); goes_on: each prompt starts with all tokens before."""
    random = np.random.default_rng(sample)
    seen: list[int] = []
    turns: list[Turn] = []
    for before, length in shapes:
        prompt = (seen if goes_on else []) + random.integers(4, 61, before).tolist()
        response = random.integers(4, 61, length).tolist()
        mask = (random.random(length) < 0.8).tolist()
        logprobs = random.standard_normal(length)
        turns.append(Turn(prompt, response, mask, logprobs=logprobs))  # type: ignore[arg-type]  # converted by the class
        seen = prompt + response
    return Trajectory("prompt", sample, tuple(turns))


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
@pytest.mark.parametrize("reduction", ["token_mean", "fixed_norm"])
def test_merging_turns_before_they_are_collated_changes_no_gradient(loss: str, reduction: str) -> None:
    attempts = [
        attempt(0, [(4, 3), (2, 5), (1, 4)], goes_on=True),
        attempt(1, [(5, 4)], goes_on=True),
        attempt(2, [(3, 2), (4, 3)], goes_on=False),
    ]
    merged = [merge_turns(trajectory) for trajectory in attempts]
    assert [len(trajectory.turns) for trajectory in merged] == [1, 1, 2]
    found: list[dict[str, Tensor]] = []
    for trajectories in (attempts, merged):
        collator = RolloutsCollator(RolloutsCollatorConfig(), 0, ParallelLayout())
        laid_out = [Group("prompt", 0, tuple(trajectories))]
        batch = collator.collate_rollouts(laid_out)
        columns, random = TurnColumns(batch, [Group("prompt", 0, tuple(attempts))], laid_out), np.random.default_rng(0)
        names = ("advantages", "values", "returns")
        batch = batch.with_tokens(
            **{name: columns.join(name, random.standard_normal(columns.num_tokens)) for name in names}
        )
        own = backend("fp64").logprobs(batch)
        nearby = own + 0.1 * batch.tokens["rollout_logprobs"]
        batch = batch.with_tokens(old_logprobs=nearby, reference_logprobs=own)
        batch, normalizer = reduced(batch, reduction, "tis of tokens")
        objective = Objective(LOSSES[loss], normalizer)
        found.append(dict(backend("fp64").gradients(batch, objective, role=role_of(loss))))
    assert_gradients_close(found[1], found[0], 1e-6)
