"""Gradients of every policy loss and reduction do not depend on rows, packing, padding, micro-batches or ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import Sample, excite, lay_out, local_backend, make_samples, write_model_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spurline.builtin import rl_configs
from spurline.builtin.local.backend import LocalBackend
from spurline.builtin.rl_configs import KlConfig
from spurline.data.batch import TrainingBatch
from spurline.data.ragged import Ragged
from spurline.losses.cispo import Cispo
from spurline.losses.corrections.mis import MaskedImportanceSampling
from spurline.losses.corrections.tis import TruncatedImportanceSampling
from spurline.losses.gspo import Gspo
from spurline.losses.policy_gradient import PolicyGradient
from spurline.losses.ppo import Ppo
from spurline.losses.sapo import Sapo
from spurline.protocols.correction import Correction
from spurline.protocols.loss import Loss, Objective
from spurline.reduction import REDUCTIONS, Reduce, fixed_norm, reduce_corrected

TOLERANCES = {"fp64": 1e-10, "fp32": 3e-6}

EXTRAS: dict[str, Any] = {"kl": KlConfig(coefficient=0.1), "entropy_coefficient": 0.05}
LOSSES: dict[str, Loss] = {
    "policy_gradient": PolicyGradient(rl_configs.PolicyGradientConfig(importance_ratio=True)),
    "ppo": Ppo(rl_configs.PpoConfig(dual_clip=3.0, **EXTRAS)),
    "gspo": Gspo(rl_configs.GspoConfig(clip_low=0.1, clip_high=0.1)),
    "cispo": Cispo(rl_configs.CispoConfig(clip_high=0.3)),
    "sapo": Sapo(rl_configs.SapoConfig(**EXTRAS)),
}
REDUCE: dict[str, Reduce] = {**REDUCTIONS, "fixed_norm": fixed_norm(16)}
CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "tis": TruncatedImportanceSampling(rl_configs.TruncatedImportanceSamplingConfig(level="sequence", cap=1.2)),
    "mis": MaskedImportanceSampling(rl_configs.MaskedImportanceSamplingConfig(low=0.7, high=1.5)),
}


@lru_cache(maxsize=1)
def model_folder() -> Path:
    return write_model_folder(Path(mkdtemp(prefix="spurline-tiny-")))


@lru_cache(maxsize=16)
def backend(precision: str, **settings: Any) -> LocalBackend:
    return excite(local_backend(model_folder(), precision=precision, **settings))


Columns = list[dict[str, Tensor]]


def rl_columns(samples: list[Sample], seed: int) -> Columns:
    """For each sample: logprobs of three other models near the trained one, and an advantage."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = backend("fp64").logprobs(lay_out(samples))
    columns = []
    for sample, own in zip(samples, logprobs, strict=True):
        own = own[: len(sample.tokens)]
        noisy = {
            name: own + 0.3 * torch.randn(len(own), generator=generator)
            for name in ("old_logprobs", "rollout_logprobs", "reference_logprobs")
        }
        columns.append({**noisy, "advantages": torch.randn(1, generator=generator).expand(len(own))})
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
    return reduce_corrected(batch, component.correct(batch).factors, REDUCE[reduction])


def rank_gradients(
    precision: str, batch: TrainingBatch, objective: Objective, ranks: int, split: dict[str, Any]
) -> dict[str, Tensor]:
    """The sum over ranks of what each computes from its share of the rows, as an all-reduce would give it."""
    batch = batch.pad_rows(ranks)
    total: dict[str, Tensor] = {}
    for share in torch.arange(batch.num_rows).chunk(ranks):
        for name, gradient in backend(precision, **split).gradients(batch.take(share), objective):
            total[name] = total[name] + gradient if name in total else gradient.clone()
    return total


@pytest.mark.parametrize("precision", sorted(TOLERANCES))
@pytest.mark.parametrize("loss", sorted(LOSSES))
@given(data=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=8, database=None)
def test_any_layout_split_and_number_of_ranks_gives_the_gradients_of_one_padded_batch(
    precision: str, loss: str, data: st.DataObject, seed: int
) -> None:
    samples = make_samples([9, *data.draw(st.lists(st.integers(2, 12), min_size=1, max_size=5))], seed, loss_share=1.1)
    columns = rl_columns(samples, seed)
    row_of = [data.draw(st.integers(0, 3)) for _ in samples]
    rows = [[number for number in range(len(samples)) if row_of[number] == row] for row in sorted(set(row_of))]
    packed = laid_out(samples, columns, rows, gap=data.draw(st.integers(0, 2)), left=data.draw(st.booleans()))
    reduction, correction = data.draw(st.sampled_from(sorted(REDUCE))), data.draw(st.sampled_from(sorted(CORRECTIONS)))
    split = data.draw(st.sampled_from([{}, {"rows_per_microbatch": 1}, {"max_tokens_per_microbatch": 20}]))

    plain, normalizer = reduced(laid_out(samples, columns), reduction, correction)
    expected = dict(backend(precision).gradients(plain, Objective(LOSSES[loss], normalizer)))
    batch, packed_normalizer = reduced(packed, reduction, correction)
    assert packed_normalizer == pytest.approx(normalizer, rel=1e-12)
    objective = Objective(LOSSES[loss], packed_normalizer)
    got = rank_gradients(precision, batch, objective, data.draw(st.integers(1, 4)), split)
    scale = torch.stack([gradient.norm() for gradient in expected.values()]).max()
    for name, gradient in expected.items():
        difference = float(
            (got[name] - gradient).norm() / torch.maximum(gradient.norm(), 1e-3 * scale).clamp(min=1e-12)
        )
        assert difference <= TOLERANCES[precision], (name, difference)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"gspo"}))
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
    expected = dict(backend("fp64").gradients(batch, Objective(LOSSES[loss], normalizer)))
    batch, per_turn_normalizer = REDUCE[reduction](per_turn)
    assert per_turn_normalizer == normalizer
    for name, gradient in backend("fp64").gradients(batch, Objective(LOSSES[loss], normalizer)):
        assert float((gradient - expected[name]).norm()) <= 1e-10 * float(expected[name].norm()), name
