"""A snapshot is what `save` would have written at that moment, and takes memory once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, lay_out, local_backend, make_samples, run_config, write_model_folder

from spurline.config.run_config import CheckpointConfig
from spurline.digests import digest_file
from spurline_models.configs import LoraConfig
from spurline_models.local.backend import LocalBackend
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.optimizers.configs import AdamWConfig
from spurline_models.weight_files import values_of_tensor
from spurline_rl.training_configs import RolloutCriticConfig

OBJECTIVE = cross_entropy(9.0)


def step(backend: LocalBackend, seed: int) -> None:
    backend.update(lay_out(make_samples([9, 12, 5], seed=seed)), OBJECTIVE)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(dropout=0.2)}])
def test_a_snapshot_that_is_written_after_more_steps_is_what_was_saved_before(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    backend = local_backend(write_model_folder(tmp_path / "model", attention_dropout=0.3), **settings)
    for number in range(3):
        step(backend, 2 * number)
        saved, written = tmp_path / f"saved-{number}", tmp_path / f"written-{number}"
        digests = backend.save(saved)
        write = backend.snapshot()
        step(backend, 2 * number + 1)
        assert write(written) == digests == {name: digest_file(saved / name) for name in files(saved)}
        assert files(written) == files(saved)


def test_a_snapshot_can_be_taken_while_others_have_the_device(tmp_path: Path) -> None:
    backend = local_backend(write_model_folder(tmp_path / "model"))
    step(backend, 0)
    backend.save(tmp_path / "saved")
    backend.yield_device(keep_weights=False)
    write = backend.snapshot()
    backend.take_device()
    step(backend, 1)
    write(tmp_path / "written")
    assert files(tmp_path / "written") == files(tmp_path / "saved")


@pytest.mark.parametrize("with_critic", [False, True])
def test_the_estimate_counts_the_copy_to_the_last_percent(tmp_path: Path, with_critic: bool) -> None:
    model = write_model_folder(tmp_path / "model")
    critic = RolloutCriticConfig.model_validate({"optimizer": AdamWConfig(learning_rate=1e-3)}) if with_critic else None
    config = LocalBackendConfig(device="cpu")
    backend = local_backend(model, run={"critic": critic})
    step(backend, 0)
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
    from safetensors.torch import load_file

    from spurline.tensor_files import write_tensor_file

    tensor = make()
    tensors = {"a": values_of_tensor(tensor), "b": values_of_tensor(torch.ones(2, dtype=torch.float64))}
    digest = write_tensor_file(tmp_path / "file", tensors, {})
    assert digest == digest_file(tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["a"], tensor)
