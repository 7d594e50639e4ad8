"""Layers whose activations are not kept are computed again, to the same bits, where gradients are asked for alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_layouts import on, write_qwen3

from spurline.protocols.backend import Backend
from spurline_megatron_backend.backend import MegatronBackend
from spurline_rl.testing.backend_cases import minibatch
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = [pytest.mark.processes, pytest.mark.slow]

NUM_LAYERS = 2


def counts(backend: Backend) -> list[dict[str, int]]:
    ranks: Any = backend
    return ranks._ranks.call("counts")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"ranks": 1}, id="one-rank"),
        pytest.param({"ranks": 2, "tensor": 2}, id="tensor"),
        pytest.param({"ranks": 2, "context": 2}, id="context"),
    ],
)
def test_what_is_recomputed_changes_no_bit_of_gradients(
    layout: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MegatronBackend, "worker", "megatron_ranks:counting")
    model = write_qwen3(tmp_path / "model", num_hidden_layers=NUM_LAYERS)
    gradients: list[dict[str, torch.Tensor]] = []
    for recompute, layers, attention in (("none", 1, 1), ("selective", 1, 2), ("full", 2, 2)):
        run = backend_run(model, on(**layout, recompute=recompute), ("megatron_backend",))
        with opened(run) as (backend, parallel):
            batch, objective = minibatch("packed", parallel)
            counts(backend)
            gradients.append(dict(backend.gradients(batch, objective)))
            wanted = {"layers": NUM_LAYERS * layers, "attention": NUM_LAYERS * attention}
            assert counts(backend) == [wanted] * layout["ranks"]
            backend.evaluate(batch, objective)
            assert counts(backend) == [{"layers": NUM_LAYERS, "attention": NUM_LAYERS}] * layout["ranks"]
    plain, *others = gradients
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in plain.items())
