"""What the local backend saves continues bit for bit, at once or from a snapshot, and what does not fit is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import excite, lay_out, local_backend, make_samples, run_config, write_model_folder
from held_weights import train
from safetensors.torch import load_file, save_file
from torch import nn

from spurline.config.run_config import CheckpointConfig, ModelConfig
from spurline.digests import digest_file
from spurline.errors import CheckpointError, CheckpointWriteError
from spurline.tensor_files import write_tensor_file
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.optimizers.configs import AdamWConfig, LinearConfig
from spurline_models.weight_files import values_of_tensor
from spurline_models.weights import weights_digest
from spurline_rl.training_configs import RolloutCriticConfig

DECAYING = {"schedule": LinearConfig(warmup_steps=2)}


def dropout_model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model", attention_dropout=0.3)


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
    with pytest.raises(CheckpointError, match=r"^model\.path: the reference model needs the weights .*model differ"):
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
    trainable = weights_digest(modules[0], only_frozen=True)
    modules.append(copy.deepcopy(modules[0]).to(torch.bfloat16))
    digests = {weights_digest(module.requires_grad_(False), only_frozen=True) for module in modules}
    assert len(digests | {trainable}) == 5


def test_the_digest_of_large_weights_reads_a_small_part_from_all_over() -> None:
    weight = nn.Parameter(torch.zeros(3000, 1000), requires_grad=False)
    module = nn.Module()
    module.register_parameter("weight", weight)
    expected = weights_digest(module, only_frozen=True)
    for part in weight.data.view(-1).tensor_split(4):
        part += 1
        assert weights_digest(module, only_frozen=True) != expected
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
    with pytest.raises(CheckpointError, match=f"{name}:? (is )?missing"):
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


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(dropout=0.2)}])
def test_a_snapshot_that_is_written_after_more_steps_is_what_was_saved_before(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    backend = local_backend(write_model_folder(tmp_path / "model", attention_dropout=0.3), **settings)
    for number in range(3):
        train(backend, range(2 * number, 2 * number + 1))
        saved, written = tmp_path / f"saved-{number}", tmp_path / f"written-{number}"
        digests = backend.save(saved)
        write = backend.snapshot()
        train(backend, range(2 * number + 1, 2 * number + 2))
        assert write(written) == digests == {name: digest_file(saved / name) for name in files(saved)}
        assert files(written) == files(saved)


def test_a_snapshot_can_be_taken_while_others_have_the_device(tmp_path: Path) -> None:
    backend = local_backend(write_model_folder(tmp_path / "model"))
    train(backend, range(1))
    backend.save(tmp_path / "saved")
    backend.yield_device(keep_weights=False)
    write = backend.snapshot()
    backend.take_device()
    train(backend, range(1, 2))
    write(tmp_path / "written")
    assert files(tmp_path / "written") == files(tmp_path / "saved")


@pytest.mark.parametrize("with_critic", [False, True])
def test_the_estimate_counts_the_copy_to_the_last_percent(tmp_path: Path, with_critic: bool) -> None:
    model = write_model_folder(tmp_path / "model")
    critic = RolloutCriticConfig.model_validate({"optimizer": AdamWConfig(learning_rate=1e-3)}) if with_critic else None
    config = LocalBackendConfig(device="cpu")
    backend = local_backend(model, run={"critic": critic})
    train(backend, range(1))
    backend.snapshot()
    copied = sum(
        buffer.nbytes
        for (group, _), buffer in backend._copies._buffers.items()
        if not group.endswith("rng") and not (with_critic and group == "critic/optimizer")
    )
    for beside in (False, True):
        run = run_config(
            model, backend=config, critic=critic, checkpoint=CheckpointConfig.model_validate({"async": beside})
        )
        estimate = config.estimate_memory(run, 10, 10)
        found = estimate.parts.get("checkpoint copy", 0)
        if not beside:
            assert found == 0
        elif not with_critic:
            assert found == pytest.approx(copied, rel=0.01)
        else:
            # Its optimizer keeps nothing before its first step.
            assert found == pytest.approx(copied * 6 / 4, rel=0.05)
        assert estimate.host == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor(2.5),
        lambda: torch.arange(6).view(2, 3).T,
        lambda: torch.ones(3) > 0,
    ],
)
def test_tensors_of_every_layout_are_written_as_they_read(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    tensors = {"a": values_of_tensor(tensor), "b": values_of_tensor(torch.ones(2, dtype=torch.float64))}
    digest = write_tensor_file(tmp_path / "file", tensors, {})
    assert digest == digest_file(tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["a"], tensor)
