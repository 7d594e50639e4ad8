"""What the local backend saves continues bit for bit, and what does not fit is refused."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, write_model_folder
from safetensors.torch import load_file, save_file
from torch import nn

from spurline.config.run_config import ModelConfig
from spurline.errors import CheckpointError, CheckpointWriteError
from spurline_models.configs import LoraConfig
from spurline_models.local.backend import LocalBackend
from spurline_models.optimizers.configs import LinearConfig
from spurline_models.weights import frozen_digest

OBJECTIVE = cross_entropy(9.0)
DECAYING = {"schedule": LinearConfig(warmup_steps=2)}


def dropout_model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model", attention_dropout=0.3)


def train(backend: LocalBackend, steps: range) -> list[Any]:
    seen = []
    for step in steps:
        metrics = backend.update(lay_out(make_samples([9, 12, 5], seed=step)), OBJECTIVE)
        seen.append({name: value for name, value in metrics.items() if not name.startswith("time/")})
    return seen


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bf16", "rows_per_microbatch": 1}, {"lora": LoraConfig(dropout=0.2)}]
)
def test_loading_continues_bit_for_bit_with_dropout_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = dropout_model(tmp_path)
    backend = local_backend(model, run=DECAYING, **settings)
    train(backend, range(3))
    backend.save(tmp_path / "saved")
    expected = train(backend, range(3, 6))
    draws = (random.random(), float(np.random.random()), float(torch.rand(())))
    weights = {name: tensor.clone() for name, tensor in backend.named_weights()}

    resumed = local_backend(model, run=DECAYING, **settings)
    random.seed(99)
    np.random.seed(99)
    resumed.load(tmp_path / "saved")
    assert train(resumed, range(3, 6)) == expected
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == draws
    for name, tensor in resumed.named_weights():
        assert torch.equal(tensor, weights[name]), name


def test_another_architecture_is_refused_with_both_shapes_and_nothing_changes(tmp_path: Path) -> None:
    saved = local_backend(dropout_model(tmp_path))
    train(saved, range(1))
    saved.save(tmp_path / "saved")
    backend = excite(local_backend(write_model_folder(tmp_path / "wide", intermediate_size=64)))
    before = {name: tensor.clone() for name, tensor in backend.named_weights()}
    with pytest.raises(CheckpointError, match=r"\[48, 32\].*in the checkpoint, but \[64, 32\]"):
        backend.load(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.named_weights())


def test_adapters_are_refused_on_another_base_model(tmp_path: Path) -> None:
    saved = local_backend(dropout_model(tmp_path), lora=LoraConfig(rank=2))
    train(saved, range(1))
    saved.save(tmp_path / "saved")
    other = local_backend(tmp_path / "model", lora=LoraConfig(rank=2), run={"seed": 5})
    before = {name: tensor.clone() for name, tensor in other.named_weights()}
    with pytest.raises(CheckpointError, match=r"other frozen weights.*model\.path"):
        other.load(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.named_weights())


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A folder with weights."""
    model = tmp_path / "model"
    local_backend(write_model_folder(model))._model.causal.save_pretrained(model)
    return model


def reference_of(model: Path, checkpoint: Path | None = None, **settings: Any) -> torch.Tensor:
    backend = local_backend(model, run={"model": ModelConfig(path=str(model))}, **settings)
    if checkpoint is not None:
        backend.load(checkpoint)
    return backend.logprobs(lay_out(make_samples([9, 12])), role="reference")


def save_trained(model: Path, path: Path) -> None:
    backend = local_backend(model, run={"model": ModelConfig(path=str(model))})
    train(backend, range(1))
    backend.save(path)


def overwrite_with_noise(model: Path) -> None:
    path = model / "model.safetensors"
    generator = torch.Generator().manual_seed(5)
    noise = {name: torch.randn(old.shape, generator=generator) for name, old in load_file(path).items()}
    save_file(noise, path, metadata={"format": "pt"})


def test_the_reference_of_a_resumed_run_is_what_the_run_started_from_over_several_resumes(
    pretrained: Path, tmp_path: Path
) -> None:
    expected = reference_of(pretrained)
    save_trained(pretrained, tmp_path / "first")
    assert torch.equal(reference_of(pretrained, tmp_path / "first"), expected)
    # The run in between needs no reference, and has no reason to mind the weights it finds.
    kept = (pretrained / "model.safetensors").read_bytes()
    overwrite_with_noise(pretrained)
    between = local_backend(pretrained, run={"model": ModelConfig(path=str(pretrained))})
    between.load(tmp_path / "first")
    train(between, range(1, 2))
    between.save(tmp_path / "second")
    with pytest.raises(CheckpointError, match=r"^model\.path: the weights of .*model are not the ones"):
        reference_of(pretrained, tmp_path / "second")
    (pretrained / "model.safetensors").write_bytes(kept)
    assert torch.equal(reference_of(pretrained, tmp_path / "second"), expected)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}])
def test_random_initial_weights_are_recognised_after_a_resume(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = dropout_model(tmp_path)
    batch = lay_out(make_samples([9, 12]))
    saved = local_backend(model, **settings)
    train(saved, range(1))
    saved.save(tmp_path / "saved")
    resumed = local_backend(model, **settings)
    resumed.load(tmp_path / "saved")
    assert torch.equal(resumed.logprobs(batch, role="reference"), local_backend(model, **settings).logprobs(batch))


def test_the_digest_tells_names_shapes_and_dtypes_apart_and_ignores_trainable_weights() -> None:
    modules = [
        nn.ModuleDict({name: nn.Linear(*shape, bias=False)})
        for name, shape in (("one", (2, 3)), ("two", (2, 3)), ("one", (3, 2)))
    ]
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.zero_()
    trainable = frozen_digest(modules[0])
    modules.append(copy.deepcopy(modules[0]).to(torch.bfloat16))
    digests = {frozen_digest(module.requires_grad_(False)) for module in modules}
    assert len(digests | {trainable}) == 5


def test_the_digest_of_large_weights_reads_a_small_part_from_all_over() -> None:
    weight = nn.Parameter(torch.zeros(3000, 1000), requires_grad=False)
    module = nn.Module()
    module.register_parameter("weight", weight)
    expected = frozen_digest(module)
    for part in weight.data.view(-1).tensor_split(4):
        part += 1
        assert frozen_digest(module) != expected
        part -= 1


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
def test_a_missing_or_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    backend = local_backend(dropout_model(tmp_path))
    train(backend, range(1))
    backend.save(tmp_path / "saved")
    path = tmp_path / "saved" / name
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=f"{name}: missing or damaged"):
        backend.load(tmp_path / "saved")
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name}: missing or damaged|it has no {name}"):
        backend.load(tmp_path / "saved")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match="file"):
        local_backend(dropout_model(tmp_path)).save(tmp_path / "file")


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16", "rows_per_microbatch": 1}, {"lora": LoraConfig(dropout=0.2)}]
)
def test_training_goes_on_bit_for_bit_after_others_had_the_device(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = dropout_model(tmp_path)
    backend = local_backend(model, run=DECAYING, **settings)
    expected = train(backend, range(4))
    weights = {name: tensor.clone() for name, tensor in backend.named_weights()}

    other = local_backend(model, run=DECAYING, **settings)
    seen: list[Any] = []
    for step, keep_weights in enumerate((True, False, False, True)):
        adapter = {name: tensor.clone() for name, tensor in other.named_adapter_weights()}
        other.yield_device(keep_weights=keep_weights)
        assert all(torch.equal(tensor, adapter[name]) for name, tensor in other.named_adapter_weights())
        (tmp_path / f"saved-{step}").mkdir()
        other.save(tmp_path / f"saved-{step}")
        other.take_device()
        seen += train(other, range(step, step + 1))
    assert seen == expected
    assert all(torch.equal(tensor, weights[name]) for name, tensor in other.named_weights())

    resumed = local_backend(model, run=DECAYING, **settings)
    resumed.load(tmp_path / "saved-2")
    assert train(resumed, range(2, 4)) == expected[2:]
