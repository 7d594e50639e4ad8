"""What the backward pass needs lies on the host, and not a bit of a gradient changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, run_config, write_model_folder
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from spurline_models.configs import LoraConfig
from spurline_models.local.backend import LocalBackend
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.placement import activation_offloading
from spurline_planning.fit import Load, memory_lines

OBJECTIVE = cross_entropy(9.0)
SMALLEST = 2048
NUM_LAYERS = 6


class Counting:
    """The tensors that go to the host and come back, and how much of them the device holds meanwhile."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sent: list[Tensor] = []
        self.held: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0
        self.fetched = 0

    def count(self, tensor: Tensor) -> None:
        self.held = [item for item in self.held if not item[0].expired()]
        self.held.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        self.peak = max(self.peak, sum(size for _, size in self.held))


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Counts the transfers of all passes; small tensors are moved too, since the models here are small."""
    counting, passes = Counting(), activation_offloading._Pass
    to_host, to_device = passes._to_host, passes._to_device

    def counted_to_host(self: Any, values: Tensor) -> Tensor:
        counting.count(values)
        counting.sent.append(to_host(self, values))
        return counting.sent[-1]

    def counted_to_device(self: Any, host: Tensor) -> Tensor:
        counting.fetched += 1
        copy = to_device(self, host)
        counting.count(copy)
        return copy

    monkeypatch.setattr(passes, "_to_host", counted_to_host)
    monkeypatch.setattr(passes, "_to_device", counted_to_device)
    monkeypatch.setattr(activation_offloading, "SMALLEST_BYTES", SMALLEST)
    return counting


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model", num_hidden_layers=NUM_LAYERS)


def gradients(backend: LocalBackend, rows: Any = None) -> dict[str, Tensor]:
    return dict(backend.gradients(lay_out(make_samples([19, 40, 5]), rows), OBJECTIVE))


def check_equal(model: Path, rows: Any = None, **settings: Any) -> None:
    """rows: how samples are packed."""
    kept, moved = (excite(local_backend(model, offload_activations=value, **settings)) for value in (False, True))
    expected = gradients(kept, rows)
    got = gradients(moved, rows)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


LORA = LoraConfig(rank=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "fp64": {"precision": "fp64", "activation_checkpointing": True},
    "cut": {"rows_per_microbatch": 1},
    "lora-bf16": {"precision": "bf16", "lora": LORA},
    "nf4": {"lora": LoraConfig(rank=4, base_dtype="nf4"), "activation_checkpointing": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradients_are_bit_for_bit_those_of_a_run_that_moves_nothing(
    model: Path, counting: Counting, settings: dict[str, Any]
) -> None:
    check_equal(model, [[0, 1], [2]], **settings)
    assert len(counting.sent) >= NUM_LAYERS
    assert counting.fetched
    assert all(host.nbytes >= SMALLEST for host in counting.sent)


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16"}, {"precision": "bf16", "lora": LORA}, {"lora": LoraConfig(rank=4, base_dtype="bf16")}],
    ids=str,
)
def test_no_parameter_and_no_rounded_copy_of_one_is_moved(
    model: Path, counting: Counting, settings: dict[str, Any]
) -> None:
    backend = excite(local_backend(model, offload_activations=True, **settings))
    gradients(backend)
    held = [parameter.detach() for parameter in backend._model.causal.parameters()]
    weights = {
        value.contiguous().view(torch.uint8).numpy().tobytes() for one in held for value in (one, one.bfloat16())
    }
    assert counting.sent
    assert not any(host.numpy().tobytes() in weights for host in counting.sent)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_the_device_holds_does_not_grow_with_the_layers(
    tmp_path: Path, counting: Counting, checkpointing: bool
) -> None:
    peaks, sent = [], []
    for number in (4, 8):
        model = write_model_folder(tmp_path / str(number), num_hidden_layers=number)
        counting.reset()
        gradients(local_backend(model, offload_activations=True, activation_checkpointing=checkpointing))
        peaks.append(counting.peak)
        sent.append(sum(host.nbytes for host in counting.sent))
    assert peaks[0] == peaks[1]
    layer = (sent[1] - sent[0]) / 4
    inputs = 64 * 32 * 4
    assert (layer == inputs) == checkpointing, "the inputs of layers and nothing else"
    # What is saved outside of layers stays with the layer beside it.
    assert peaks[1] <= 2 * layer + 4 * inputs


def test_a_tensor_that_several_operations_save_is_moved_once(model: Path, counting: Counting) -> None:
    gradients(local_backend(model, offload_activations=True))
    contents = [host.numpy().tobytes() for host in counting.sent]
    assert len(set(contents)) >= 0.9 * len(contents)


def test_compiled_models_are_refused() -> None:
    config = LocalBackendConfig(offload_activations=True, compile=True)
    assert [problem.key for problem in config.problems(run_config("m"))] == ["offload_activations"]


def test_a_plan_counts_two_layers_on_a_gpu_and_the_rest_on_the_host(tmp_path: Path) -> None:
    run = run_config(write_model_folder(tmp_path, num_hidden_layers=8))
    for checkpointing in (False, True):
        kept, moved = (
            LocalBackendConfig(device="cuda", offload_activations=value, activation_checkpointing=checkpointing)
            for value in (False, True)
        )
        before, after = (config.estimate_memory(run, 100, 100) for config in (kept, moved))
        assert before.host == 0
        assert after.host == before.parts["activations"] - after.parts["activations"]
        assert after.parts["activations"] < 0.9 * before.parts["activations"]
    assert {"offload_activations": True} in list(kept.savings(run, 100, 100))
    assert {"offload_activations": True} not in list(moved.savings(run, 100, 100))
    lines = memory_lines(run.model_copy(update={"backend": moved}), Load(100, 100), 80 << 30)
    assert any(line.startswith("in the memory of the fullest machine") for line in lines)


def test_on_the_cpu_it_saves_nothing(tmp_path: Path) -> None:
    run = run_config(write_model_folder(tmp_path))
    config = LocalBackendConfig(device="cpu", offload_activations=True)
    assert config.estimate_memory(run, 100, 100) == LocalBackendConfig(device="cpu").estimate_memory(run, 100, 100)
    assert {"offload_activations": True} not in list(LocalBackendConfig(device="cpu").savings(run, 100, 100))
