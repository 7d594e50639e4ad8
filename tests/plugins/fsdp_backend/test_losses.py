"""Every loss with every reduction and correction has the gradient of the local backend, on 1, 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsdp_layouts import on
from loss_cases import CORRECTIONS, LOSSES, REGISTRY, LossGradients

from spurline.protocols.backend import Backend
from spurline_models.testing import write_tiny_model
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes


def test_no_loss_and_no_correction_of_core_is_left_out() -> None:
    for kind, listed in (("loss", LOSSES), ("correction", CORRECTIONS)):
        assert {entry.name for entry in REGISTRY.entries() if entry.kind == kind} == set(listed)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def wanted(model: Path) -> Iterator[LossGradients]:
    with opened(backend_run(model, {"name": "models/local", "device": "cpu", "probe": False})) as (backend, _):
        yield LossGradients(backend)


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, model: Path) -> Iterator[Backend]:
    with opened(backend_run(model, on(request.param, probe=False), ("fsdp_backend",))) as (backend, _):
        yield backend


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_the_gradient_of_the_local_backend(name: str, ranks: Backend, wanted: LossGradients) -> None:
    wanted.assert_equal_those_of(ranks, name)
