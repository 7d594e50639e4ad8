"""The inputs of checkpointed layers lie on the host, and not a bit of a gradient changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, run_config, write_model_folder
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from spurline_models.configs import LoraConfig
from spurline_models.local.backend import LocalBackend
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.streams import stream_model
from spurline_planning.fit import Load, memory_lines

NUM_LAYERS = 6
TOKENS = [19, 40, 5]


def gradients(backend: LocalBackend) -> dict[str, Tensor]:
    batch = lay_out(make_samples(TOKENS), [[0, 1], [2]])
    return dict(backend.gradients(batch, cross_entropy(9.0)))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "fp64": {"precision": "fp64"},
    "cut": {"rows_per_microbatch": 1},
    "lora-bf16": {"precision": "bf16", "lora": LoraConfig(rank=4)},
    "nf4": {"lora": LoraConfig(rank=4, base_dtype="nf4")},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradients_are_bit_for_bit_those_of_a_run_that_moves_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = write_model_folder(tmp_path, num_hidden_layers=NUM_LAYERS)
    kept, moved = (
        excite(local_backend(model, activation_checkpointing=True, offload_activations=value, **settings))
        for value in (False, True)
    )
    expected, got = gradients(kept), gradients(moved)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_the_inputs_of_all_layers_are_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []

    class Counting(saved_tensors_hooks):
        def __init__(self, *, pin_memory: bool) -> None:
            assert pin_memory
            super().__init__(lambda tensor: sent.append(tensor) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(stream_model, "save_on_cpu", Counting)
    model = write_model_folder(tmp_path, num_hidden_layers=NUM_LAYERS)
    gradients(local_backend(model, activation_checkpointing=True, offload_activations=True))
    inputs = [tensor for tensor in sent if tensor.shape == (1, sum(TOKENS), 32)]
    assert len(inputs) >= NUM_LAYERS
    # The rest is of the embedding and the last norm.
    assert sum(tensor.nbytes for tensor in sent) <= sum(tensor.nbytes for tensor in inputs) + 4096


@pytest.mark.parametrize("settings", [{"compile": True, "activation_checkpointing": True}, {}], ids=str)
def test_compiled_layers_and_layers_that_are_not_checkpointed_are_refused(settings: dict[str, Any]) -> None:
    problems = list(LocalBackendConfig(offload_activations=True, **settings).problems(run_config("m")))
    assert [problem.key for problem in problems] == ["offload_activations"]


def test_a_plan_counts_two_layers_on_a_gpu_and_the_rest_on_the_host(tmp_path: Path) -> None:
    run = run_config(write_model_folder(tmp_path, num_hidden_layers=8))
    kept, moved = (
        LocalBackendConfig(device="cuda", offload_activations=value, activation_checkpointing=True)
        for value in (False, True)
    )
    before, after = (config.estimate_memory(run, 100, 100) for config in (kept, moved))
    assert before.host == 0
    moved_bytes = before.parts["activations"] - after.parts["activations"]
    assert moved_bytes == 6 * 100 * 32 * 4
    # Pinned memory is rounded up to powers of two.
    assert after.host == 6 * 2**14
    assert after.parts["activations"] < 0.9 * before.parts["activations"]
    assert {"offload_activations": True} in list(kept.savings(run, 100, 100))
    assert {"offload_activations": True} not in list(moved.savings(run, 100, 100))
    lines = memory_lines(run.model_copy(update={"backend": moved}), Load(100, 100), 80 << 30)
    assert any(line.startswith("in the memory of the fullest machine") for line in lines)


def test_on_the_cpu_it_saves_nothing(tmp_path: Path) -> None:
    run = run_config(write_model_folder(tmp_path))
    kept, moved = (
        LocalBackendConfig(device="cpu", offload_activations=value, activation_checkpointing=True)
        for value in (False, True)
    )
    assert moved.estimate_memory(run, 100, 100) == kept.estimate_memory(run, 100, 100)
    assert {"offload_activations": True} not in list(kept.savings(run, 100, 100))
