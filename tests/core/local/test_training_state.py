"""What the local backend saves continues bit for bit, and what does not fit is refused."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import excite, lay_out, local_backend, make_samples, write_model_folder
from torch import nn

from spurline.builtin.configs import CrossEntropyConfig, LoraConfig
from spurline.builtin.local.backend import LocalBackend
from spurline.builtin.local.frozen_digest import frozen_digest
from spurline.config.run_config import ScheduleConfig
from spurline.errors import CheckpointError, CheckpointWriteError
from spurline.losses.cross_entropy import CrossEntropy
from spurline.protocols.loss import Objective

OBJECTIVE = Objective(CrossEntropy(CrossEntropyConfig()), 9.0)
DECAYING = {"schedule": ScheduleConfig(name="linear", warmup_steps=2)}


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


def test_saving_right_away_and_loading_back_changes_nothing(tmp_path: Path) -> None:
    backend = local_backend(dropout_model(tmp_path))
    backend.save(tmp_path / "fresh")
    expected = train(backend, range(2))
    backend.load(tmp_path / "fresh")
    other = local_backend(tmp_path / "model")
    other.load(tmp_path / "fresh")
    assert train(other, range(2)) == expected


def test_a_checkpoint_is_safetensors_and_json_only(tmp_path: Path) -> None:
    backend = local_backend(dropout_model(tmp_path))
    train(backend, range(1))
    backend.save(tmp_path / "saved")
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]
    assert json.loads((tmp_path / "saved/state.json").read_text())["updates"] == 1


def test_another_architecture_is_refused_with_both_shapes_and_nothing_changes(tmp_path: Path) -> None:
    saved = local_backend(dropout_model(tmp_path))
    train(saved, range(1))
    saved.save(tmp_path / "saved")
    backend = excite(local_backend(write_model_folder(tmp_path / "wide", intermediate_size=64)))
    before = {name: tensor.clone() for name, tensor in backend.named_weights()}
    with pytest.raises(CheckpointError, match=r"\[48, 32\].*in the checkpoint, but \[64, 32\]"):
        backend.load(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.named_weights())


def test_a_checkpoint_of_adapters_is_refused_by_a_run_without_them(tmp_path: Path) -> None:
    model = dropout_model(tmp_path)
    local_backend(model, lora=LoraConfig(rank=2)).save(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match=r"missing .*backend\.lora"):
        local_backend(model).load(tmp_path / "adapters")


def test_adapters_are_refused_on_another_base_model(tmp_path: Path) -> None:
    saved = local_backend(dropout_model(tmp_path), lora=LoraConfig(rank=2))
    train(saved, range(1))
    saved.save(tmp_path / "saved")
    other = local_backend(tmp_path / "model", lora=LoraConfig(rank=2), run={"seed": 5})
    before = {name: tensor.clone() for name, tensor in other.named_weights()}
    with pytest.raises(CheckpointError, match=r"other frozen weights.*model\.path"):
        other.load(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.named_weights())


@pytest.mark.parametrize("place", [0, 1, 700, -1])
def test_the_digest_of_small_frozen_weights_sees_every_value(place: int) -> None:
    def digest(module: nn.Module) -> str:
        return frozen_digest(module.requires_grad_(False))

    module = nn.Linear(40, 30)
    expected = digest(module)
    assert digest(module) == expected
    with torch.no_grad():
        module.weight.view(-1)[place] += 1
    assert digest(module) != expected


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
    with pytest.raises(CheckpointError, match=f"{name}: missing or damaged"):
        backend.load(tmp_path / "saved")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match="file"):
        local_backend(dropout_model(tmp_path)).save(tmp_path / "file")
