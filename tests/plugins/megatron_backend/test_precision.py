"""What bf16 keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_layouts import on, write_qwen3

from spurline_rl.testing.backend_cases import minibatch, values_batch
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"ranks": 2, "tensor": 2}, id="tensor"),
        pytest.param({"ranks": 2, "pipeline": 2}, id="pipeline", marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "context": 2}, id="context", marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "max_tokens_per_microbatch": 40}, id="data", marks=pytest.mark.slow),
    ],
)
def test_bf16_steps_stay_near_those_of_the_local_backend_in_bf16(layout: dict[str, Any], tmp_path: Path) -> None:
    model = write_qwen3(tmp_path / "model")
    alone = {"name": "models/local", "device": "cpu"}
    local_run = backend_run(model, {**alone, "precision": "bf16"}, critic=True)
    run = backend_run(model, on(**layout, precision="bf16"), ("megatron_backend",), critic=True)
    exact_run = backend_run(model, alone)
    with opened(run) as (backend, parallel), opened(local_run) as (local, _), opened(exact_run) as (exact, _):
        batch, objective = minibatch("packed", parallel)
        assert abs(backend.evaluate(batch, objective).loss / exact.evaluate(batch, objective).loss - 1) > 1e-6
        # Of the reference, which has no weights in fp32.
        reference = backend.logprobs(batch, "reference")
        assert torch.equal(reference, backend.logprobs(batch))
        for step in range(3):
            got, wanted = (one.update(*minibatch("packed", parallel, step)) for one in (backend, local))
            assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
            assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-2)
        for step in range(2):
            # Its head is in fp32: Megatron sums gradients of the two dtypes in buffers of their own. The head begins
            # with 0, so only from the second step on is there a gradient below it.
            got, wanted = (one.update(*values_batch(parallel, step), role="critic") for one in (backend, local))
            assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
            assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-2)
        assert torch.equal(reference, backend.logprobs(batch, "reference"))
        assert not torch.equal(reference, backend.logprobs(batch))
