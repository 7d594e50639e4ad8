"""Every loss with every reduction and correction has the gradient of the local backend, on 1, 2 and 3 ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from backend_batches import lay_out, make_samples
from fsdp_layouts import on
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.plugins.host import PluginHost
from spurline.protocols.backend import Backend
from spurline.protocols.loss import Objective
from spurline.testing import write_tiny_model
from spurline.testing.backend_cases import assert_gradients_close
from spurline.testing.backend_runs import backend_run, opened
from spurline.update.reduction import REDUCTIONS, fixed_norm, reduce_corrected

pytestmark = pytest.mark.processes

SOAK = bool(os.environ.get("SPURLINE_SOAK"))
"""Else corrections meet one reduction only: both are weights by the time that they reach a rank."""
REGISTRY = PluginHost.load([]).registry
EXTRAS: dict[str, Any] = {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.05}
LOSSES: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "dft": {},
    "dpo": {"beta": 0.5, "label_smoothing": 0.1, "sft_weight": 0.3},
    "policy_gradient": {"importance_ratio": True},
    "ppo": {"dual_clip": 3.0, **EXTRAS},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"clip_high": 0.3},
    "sapo": EXTRAS,
    "value": {},
}
REDUCE = {**REDUCTIONS, "fixed_norm": fixed_norm(16)}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "tis": {"level": "sequence", "cap": 1.2},
    "mis": {"low": 0.7, "high": 1.5},
    "geometric_rejection": {"low": 0.9, "high": 1.1},
    "sequence_rejection": {"low": 0.5, "high": 2.0},
}


def test_no_loss_and_no_correction_of_core_is_left_out() -> None:
    for kind, listed in (("loss", LOSSES), ("correction", CORRECTIONS)):
        assert {entry.name for entry in REGISTRY.entries("core") if entry.kind == kind} == set(listed)


@lru_cache(maxsize=1)
def model() -> Path:
    return write_tiny_model(Path(mkdtemp(prefix="spurline-tiny-")), num_hidden_layers=1)


@pytest.fixture(scope="module")
def local() -> Iterator[Backend]:
    with opened(backend_run(model(), {"name": "core/local", "device": "cpu", "probe": False})) as (backend, _):
        yield backend


@pytest.fixture(scope="module")
def batch(local: Backend) -> TrainingBatch:
    """Ten answers to five prompts, both of a prompt in one unit, with all columns that any loss reads."""
    samples = make_samples([9, 21, 4, 33, 12, 8, 17, 5, 26, 13], seed=2)
    pairs = [row // 2 for row in range(len(samples))]
    named = [replace(sample, uid=f"prompt-{pair}") for pair, sample in zip(pairs, samples, strict=True)]
    batch = lay_out(named, unit_ids=pairs)
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch.num_rows, batch.length, generator=generator)

    logprobs = local.logprobs(batch)
    others = {name: (logprobs + noise(0.3)).clamp(max=0) for name in ("old_logprobs", "rollout_logprobs")}
    reference = {"reference_logprobs": (logprobs + noise(0.3)).clamp(max=0), "values": logprobs + noise(0.3)}
    advantages = torch.randn(batch.num_rows, 1, generator=generator).expand(-1, batch.length)
    sign = torch.tensor([1, -1] * (batch.num_rows // 2))
    pair_ids = ((torch.tensor(pairs) + 1) * sign)[:, None].expand(-1, batch.length)
    return batch.with_tokens(**others, **reference, advantages=advantages, returns=noise(1.0), pair_ids=pair_ids)


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with opened(backend_run(model(), on(request.param, probe=False), ("fsdp_backend",))) as (backend, _):
        yield backend


Gradients = dict[str, Tensor]
WANTED: dict[tuple[str, str, str], Gradients] = {}
"""Of the local backend, by loss, reduction and correction."""


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_the_gradient_of_the_local_backend(
    name: str, ranks: Backend, local: Backend, batch: TrainingBatch
) -> None:
    loss = REGISTRY.create("loss", REGISTRY.get("loss", name).config.model_validate({"name": name, **LOSSES[name]}))
    # A correction may reject one answer of a pair, and no source has pairs and corrections.
    corrections = ["none", *CORRECTIONS] if loss.config.trains_on != "pairs" else ["none"]
    for reduction, correction in product(REDUCE, corrections):
        if not SOAK and correction != "none" and reduction != "token_mean":
            continue
        weighted, normalizer = reduced(batch, reduction, correction)
        objective = Objective(loss, normalizer, 0.8)
        case = (name, reduction, correction)
        if case not in WANTED:
            WANTED[case] = dict(local.gradients(weighted, objective))
        assert_gradients_close(ranks.gradients(weighted, objective), WANTED[case], 1e-5)


def reduced(batch: TrainingBatch, reduction: str, correction: str) -> tuple[TrainingBatch, float]:
    if correction == "none":
        return REDUCE[reduction](batch)
    config = REGISTRY.get("correction", correction).config
    made = REGISTRY.create("correction", config.model_validate({"name": correction, **CORRECTIONS[correction]}))
    factors = made.correct(batch).factors
    assert not bool((factors == 1).all()), f"{correction} corrects nothing here"
    return reduce_corrected(batch, factors, REDUCE[reduction])
