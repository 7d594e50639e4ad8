"""Layers with fused kernels are compiled once for all of them, and Liger's kernels are compiled for a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, write_model_folder
from fused_kernels import Fused
from torch._dynamo.utils import counters

SUPPORT = Path(__file__).parents[1] / "support" / "liger_for_gpu.py"
PTXAS = find_spec("triton") and find_spec("triton.backends.nvidia")
LAYERS = 4
OBJECTIVE = cross_entropy(20.0)
BATCHES = [lay_out(make_samples(lengths, seed=len(lengths))) for lengths in ([19, 22, 15], [21, 27], [10, 31, 14, 20])]


def test_layers_with_fused_kernels_share_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fused(monkeypatch)
    # Code for a CPU is not the question, and takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    folder = write_model_folder(tmp_path / "model", num_hidden_layers=LAYERS)
    plain = excite(local_backend(folder))
    for settings in ({}, {"activation_checkpointing": True}):
        torch._dynamo.reset()
        counters.clear()
        fused = excite(local_backend(folder, kernels="liger", compile=True, **settings))
        graphs = []
        for batch in BATCHES:
            before = counters["stats"]["unique_graphs"]
            expected = dict(plain.gradients(batch, OBJECTIVE))
            for name, gradient in fused.gradients(batch, OBJECTIVE):
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
            graphs.append(counters["stats"]["unique_graphs"] - before)
        # The start of a layer, its attention up to the scores, the rest of its attention, and its gated activations.
        assert graphs == [4, 0, 0], "neither another layer nor another number of tokens is compiled again"
    assert not counters["recompile_limit"]


@pytest.mark.processes
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="the extra liger is not installed")
@pytest.mark.skipif(not PTXAS, reason="the installed Triton has no compiler for NVIDIA's GPUs")
def test_the_kernels_that_layers_launch_are_compiled_for_a_gpu_and_traced_in_one_graph() -> None:
    done = subprocess.run([sys.executable, SUPPORT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    parts = ("norm", "norm of heads", "swiglu", "geglu", "rope")
    assert {name.partition(":")[0] for name in found["code"]} == set(parts)
    assert len(found["code"]) == 2 * 2 * len(parts), "forward and backward, in fp32 and bf16"
    assert min(found["code"].values()) > 1000
    assert found["graphs"] == dict.fromkeys(parts, 1)
