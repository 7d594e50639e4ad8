"""Weights come straight from their files: never two copies of a model, and none that depends on the files any more."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import pytest
import torch
from backend_batches import run_config, write_model_folder
from safetensors import safe_open
from safetensors.torch import save_file

from spurline.config.run_config import ModelConfig
from spurline_models import weight_files
from spurline_models.architecture import build_without_memory, load_model_config
from spurline_models.device_profile import device_profile
from spurline_models.loading import load_model
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.local.trained_model import WeightPlacement

MIB = 1 << 20
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 4096}


@contextmanager
def growth() -> Iterator[Callable[[], int]]:
    """Gives a function for by how many bytes the anonymous memory of this process has grown at most."""
    # What is imported takes memory too, and what is free would be used again without a trace.
    assert peft.LoraConfig
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: peak - before
    finally:
        done.set()
        thread.join()


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def write_weights(folder: Path, dtype: torch.dtype) -> Path:
    """A model folder whose weights are as large as the shape says, and were never all in memory here."""
    model = ModelConfig(path=str(folder))
    layout = build_without_memory(load_model_config(model), model).state_dict()
    weights = {name: torch.full(value.shape, 0.01, dtype=dtype) for name, value in layout.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("base_dtype", "stored"),
    [pytest.param("auto", torch.bfloat16, id="as they are stored"), pytest.param("bf16", torch.float32, id="rounded")],
)
def test_loading_takes_at_most_a_few_tensors_more_than_what_it_loads(
    tmp_path: Path, base_dtype: str, stored: torch.dtype
) -> None:
    folder = write_weights(write_model_folder(tmp_path / "model", **WIDE), stored)
    run = run_config(folder, model=ModelConfig(path=str(folder)))
    config = LocalBackendConfig.model_validate({"lora": {"rank": 2, "base_dtype": base_dtype}})
    with growth() as grown:
        causal, _ = WeightPlacement(config, run, device_profile("cpu")).load_trainable()
        held = sum(parameter.nbytes for parameter in causal.parameters())
        assert held > 80 * MIB
        # Wide weights would take as much again, and twice as much as long as they are there.
        assert grown() < held + 40 * MIB


def test_a_loaded_model_does_not_depend_on_its_files(tmp_path: Path) -> None:
    folder = write_weights(write_model_folder(tmp_path / "model"), torch.float32)
    (file,) = folder.glob("*.safetensors")
    causal = load_model(ModelConfig(path=str(folder)), device_profile("cpu"), 0)
    with file.open("r+b") as opened:
        opened.seek(-4096, os.SEEK_END)
        opened.write(bytes(4096))
    with safe_open(file, "pt") as rewritten:
        assert any((rewritten.get_tensor(name) == 0).any() for name in rewritten.keys())  # noqa: SIM118
    assert all((value == 0.01).all() for value in causal.parameters())


def test_of_a_repository_only_the_files_that_are_loaded_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if len(asked) == 1:
            names = {"a": "part-2.safetensors", "b": "part-1.safetensors"}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        else:
            for file in allow_patterns:
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(weight_files, "snapshot_download", download)
    monkeypatch.setattr("spurline_text.hub.hub_answers", lambda: False)
    found = weight_files.safetensors_files(ModelConfig(path="nobody/model"))
    assert [file.name for file in found] == ["part-1.safetensors", "part-2.safetensors"]
    assert asked == [
        ["model.safetensors", "model.safetensors.index.json"],
        ["part-1.safetensors", "part-2.safetensors"],
    ]
