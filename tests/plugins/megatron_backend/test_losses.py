"""Every loss with every reduction and correction has the gradient of the local backend, however ranks divide it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loss_cases import LOSSES, LossGradients
from megatron_layouts import on, write_qwen3

from spurline.protocols.backend import Backend
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wanted(model: Path) -> Iterator[LossGradients]:
    with opened(backend_run(model, {"name": "models/local", "device": "cpu", "probe": False})) as (backend, _):
        yield LossGradients(backend)


@pytest.fixture(
    scope="module",
    params=[
        {"ranks": 2, "tensor": 2},
        pytest.param({"ranks": 2, "pipeline": 2, "max_tokens_per_microbatch": 48}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def ranks(request: pytest.FixtureRequest, model: Path) -> Iterator[Backend]:
    settings: dict[str, Any] = request.param
    with opened(backend_run(model, on(**settings, probe=False), ("megatron_backend",))) as (backend, _):
        yield backend


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_the_gradient_of_the_local_backend(name: str, ranks: Backend, wanted: LossGradients) -> None:
    wanted.assert_equal_those_of(ranks, name)
