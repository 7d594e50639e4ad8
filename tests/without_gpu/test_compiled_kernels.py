"""Layers whose functions are replaced by fused kernels are compiled once for all of them, and compute the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, write_model_folder
from fused_kernels import Fused
from torch._dynamo.utils import counters

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
        # The reference and models of other runs compute in the same process, by functions of the same code.
        assert dict(plain.gradients(BATCHES[0], OBJECTIVE)).keys() == expected.keys()
    assert not counters["recompile_limit"]
