"""Experts that a batch brings are those of the local backend, however ranks divide model and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_layouts import on, write_qwen3_moe

from spurline.data.batch import TrainingBatch
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_rl.testing.backend_cases import minibatch
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

LAYERS, EXPERTS, TOP_K = 4, 8, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    return write_qwen3_moe(folder, num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TOP_K)


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[Backend]:
    with opened(backend_run(model, {"name": "models/local", "device": "cpu"})) as (backend, _):
        yield backend


@pytest.fixture(
    scope="module",
    params=[
        # Layers are computed again, and each rank routes half of the tokens.
        {"ranks": 2, "tensor": 2, "recompute": "full"},
        # Two micro-batches are under way on a stage at a time, and each stage has every other layer.
        pytest.param(
            {"ranks": 2, "pipeline": 2, "virtual_stages": 2, "max_tokens_per_microbatch": 40, "recompute": "full"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"ranks": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "expert": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def ranks(request: pytest.FixtureRequest, model: Path) -> Iterator[Backend]:
    settings: dict[str, Any] = request.param
    with opened(backend_run(model, on(**settings), ("megatron_backend",))) as (backend, _):
        yield backend


def with_experts(batch: TrainingBatch, seed: int = 0) -> TrainingBatch:
    """Different random experts for each token, of one in five none: there routers choose."""
    random = np.random.default_rng(seed)
    scores = random.random((batch.num_rows, batch.length, LAYERS, EXPERTS))
    experts = scores.argsort(-1)[..., :TOP_K].astype(np.int16)
    experts[random.random(experts.shape[:2]) < 0.2] = -1
    return batch.with_tokens(routed_experts=torch.from_numpy(experts))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def test_gradients_of_replayed_experts_are_those_of_the_local_backend(ranks: Backend, local: Backend) -> None:
    free, objective = minibatch("packed", ParallelLayout())
    batch = with_experts(free)
    expected = dict(local.gradients(batch, objective))
    own = dict(local.gradients(free, objective))
    found = dict(ranks.gradients(batch, objective))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(found[name], gradient) <= 1e-5, name
    routers = [name for name in expected if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS
    for name in routers:
        assert float(found[name].norm()) > 1e-4
        assert relative(own[name], expected[name]) > 0.1, "replay must make a difference, or this test says nothing"


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("role", ["policy", "reference"])
def test_each_role_computes_with_the_experts_of_the_batch(
    ranks: Backend, local: Backend, layout: str, role: Any
) -> None:
    free, _ = minibatch(layout, ParallelLayout())
    batch = with_experts(free)
    found, expected = ranks.logprobs(batch, role), local.logprobs(batch, role)
    assert float((found - expected).abs().max()) <= 1e-5
    assert float((local.logprobs(free, role) - expected).abs().max()) > 1e-2
    # Nothing of it is left for a batch without.
    assert float((ranks.logprobs(free, role) - local.logprobs(free, role)).abs().max()) <= 1e-5


def test_an_update_counts_the_tokens_of_each_expert_as_the_local_backend_does(
    ranks: Backend, model: Path, tmp_path: Path
) -> None:
    ranks.save(tmp_path)
    batch, objective = minibatch("packed", ParallelLayout())
    batch = with_experts(batch)
    # One of its own: `local` must stay as it is for the next ranks.
    with opened(backend_run(model, {"name": "models/local", "device": "cpu"})) as (local, _):
        found, expected = (backend.update(batch, objective) for backend in (ranks, local))
    # The tests after this one, in whatever order, compare weights that have not moved.
    ranks.load(tmp_path)
    names = [name for name in expected if name.startswith("moe/")]
    assert len(names) == 3
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-9)
