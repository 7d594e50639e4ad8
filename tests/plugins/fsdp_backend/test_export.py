"""Ranks write their weights as Hugging Face folders, and a checkpoint of theirs is exported by one process alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_layouts import on
from safetensors.torch import load_file

from spurline.config.loading import LoadedConfig
from spurline.digests import FileDigest
from spurline.plugins.registry import resolve
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_models import saved_weights
from spurline_models.testing import write_tiny_model, write_tiny_moe_model
from spurline_models.weight_files import write_weight_files
from spurline_rl.testing.backend_cases import minibatch
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

ONE = ParallelLayout(data=1)
FILE_BYTES = 30_000


class Trained:
    """An open backend after two steps, and what its `save` and `write_weights` gave."""

    def __init__(self, loaded: LoadedConfig, backend: Backend, folder: Path) -> None:
        self.loaded, self.backend = loaded, backend
        for step in range(2):
            backend.update(*minibatch("packed", ONE, step))
        self.checkpoint, self.written = folder / "checkpoint", folder / "written"
        self.checkpoint.mkdir()
        self.written.mkdir()
        self.digests: Mapping[str, FileDigest] = backend.save(self.checkpoint)
        backend.write_weights(self.written, torch.bfloat16, FILE_BYTES)

    def export(self, out: Path) -> Path:
        """Read the checkpoint as `spurline export` does."""
        reader = self.loaded.config.backend.facts.checkpoint_reader
        assert reader is not None
        stream = resolve(reader, "reader")(self.loaded.config, self.checkpoint, self.digests)
        out.mkdir()
        write_weight_files(out, stream, torch.bfloat16, FILE_BYTES)
        return out


def settings_of(kind: str) -> dict[str, Any]:
    if kind == "replicas":
        return on(4, replicas=2)
    return on(2, lora={"rank": 4, "alpha": 8.0}) if kind == "adapters" else on(2)


def run_of(kind: str, folder: Path, settings: Mapping[str, Any]) -> LoadedConfig:
    write = write_tiny_moe_model if kind == "experts" else write_tiny_model
    model = write(folder / "model", tie_word_embeddings=kind == "tied")
    return backend_run(model, {**settings, "probe": False}, ("fsdp_backend",))


@pytest.fixture(
    scope="module", params=["tied", "adapters", "experts", pytest.param("replicas", marks=pytest.mark.slow)]
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp(request.param)
    loaded = run_of(request.param, folder, settings_of(request.param))
    with opened(loaded) as (backend, _):
        yield Trained(loaded, backend, folder)


def test_ranks_write_what_the_backend_names(trained: Trained) -> None:
    named = {name: tensor.bfloat16() for name, tensor in trained.backend.named_weights()}
    files = sorted(trained.written.glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written.keys() == named.keys()
    assert all(torch.equal(written[name], named[name]) for name in named)


def test_a_checkpoint_is_exported_without_ranks_as_its_ranks_write_it(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the whole model was loaded")

    monkeypatch.setattr(saved_weights, "load_model", refuse)
    assert contents(trained.export(tmp_path / "out")) == contents(trained.written)


def test_ranks_that_cannot_write_say_so_and_stay(tmp_path: Path) -> None:
    with opened(run_of("plain", tmp_path, on(2))) as (backend, _):
        with pytest.raises(OSError, match=r"rank 0 on .*No such file or directory.*missing"):
            backend.write_weights(tmp_path / "missing", torch.float32, FILE_BYTES)
        whole, taken = tmp_path / "whole", tmp_path / "taken"
        whole.mkdir()
        backend.write_weights(whole, torch.float32, FILE_BYTES)
        names = sorted(path.name for path in whole.glob("*.safetensors"))
        second = names[1]
        taken.mkdir()
        (taken / second).write_bytes(b"")
        with pytest.raises(OSError, match=f"rank 1 on .*File exists.*{second}"):
            backend.write_weights(taken, torch.float32, FILE_BYTES)
        written, asked = contents(taken), contents(whole)
        assert all(written[name] == asked[name] for name in names[::2]), "the first rank has written its files"
        backend.update(*minibatch("packed", ONE, 0))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
