"""Steps with gradients summed early, and with layers that are computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_layouts import on, write_qwen3, write_qwen3_moe

from spurline.protocols.backend import Backend
from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_rl.testing.backend_cases import assert_gradients_close, minibatch
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

soak = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        pytest.param({"ranks": 2}, False, id="data"),
        pytest.param({"ranks": 2}, True, id="experts", marks=soak),
        pytest.param({"ranks": 4, "expert": 2}, True, id="divided-experts", marks=soak),
        pytest.param({"ranks": 4, "tensor": 2}, False, id="tensor", marks=soak),
        pytest.param({"ranks": 2, "context": 2, "recompute": "full"}, False, id="context", marks=soak),
        pytest.param({"ranks": 4, "pipeline": 2}, False, id="pipeline", marks=soak),
        pytest.param({"ranks": 4, "pipeline": 2, "virtual_stages": 2}, False, id="interleaved", marks=soak),
    ],
)
def test_many_buckets_give_the_gradients_and_weights_of_one_process(
    layout: dict[str, Any], experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MegatronBackendConfig, "worker", "megatron_ranks:nothing_is_wrong_with_small_buckets")
    write = write_qwen3_moe if experts else write_qwen3
    model = write(tmp_path / "model", num_hidden_layers=4)
    ours = backend_run(model, on(**layout, max_tokens_per_microbatch=40), ("megatron_backend",))
    theirs = backend_run(model, {"name": "models/local", "device": "cpu", "probe": False})
    with opened(theirs) as (local, _), opened(ours) as (backend, parallel):
        # Sums begin early from the second pass on, which is the first that knows what it waits for.
        for step in range(3):
            batch, objective = minibatch("packed", parallel, step)
            # Adam turns what is rounding in small gradients into weights that differ by more.
            tolerance = 1e-5 if step == 0 else 1e-4
            assert_gradients_close(backend.gradients(batch, objective), local.gradients(batch, objective), tolerance)
            wanted, found = local.update(batch, objective), backend.update(batch, objective)
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        weights = dict(backend.named_weights())
        for name, value in local.named_weights():
            assert (weights[name] - value).abs().max() <= 1e-5, name


NUM_LAYERS = 2


def counts(backend: Backend) -> list[dict[str, int]]:
    ranks: Any = backend
    return ranks._ranks.call("counts")


@pytest.mark.slow
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
    monkeypatch.setattr(MegatronBackendConfig, "worker", "megatron_ranks:counting")
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
