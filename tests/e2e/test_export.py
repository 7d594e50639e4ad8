"""A run's weights as a Hugging Face folder, from the run itself and from its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from spurline import Run, load_config
from spurline.backends.local.configs import LocalBackendConfig
from spurline.config.run_config import RunConfig
from spurline.digests import FileDigest
from spurline.errors import CheckpointError
from spurline.model.weight_files import WeightStream
from spurline.run import export
from spurline.run.export import export_run


def read_saved(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> WeightStream:
    """What a backend's `checkpoint_reader` does."""
    if not (folder / "model.safetensors").exists():
        raise CheckpointError(f"{folder}: nothing of the backend '{run.backend.name}' is there.")
    weights = load_file(folder / "model.safetensors")
    return WeightStream({name: tensor.to("meta") for name, tensor in weights.items()}, iter(weights.items()))


def test_a_checkpoint_is_exported_by_its_reader_alone_where_the_backend_has_one(
    base_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_config["checkpoint"]["export_hf"] = True
    loaded = load_config(base_config)
    Run(loaded).train()

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the backend was built")

    monkeypatch.setattr(export, "build_backend", refuse)
    monkeypatch.setattr(LocalBackendConfig, "checkpoint_reader", f"{__name__}:read_saved")
    export_run(loaded, tmp_path / "exported")
    assert contents(tmp_path / "exported") == contents(Path(base_config["run_dir"]) / "model")


def test_a_reader_that_fails_leaves_no_folder(
    base_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_config(base_config)
    Run(loaded).train()
    before = set(tmp_path.iterdir())

    def fail(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> WeightStream:
        def tensors() -> Any:
            yield from list(whole.tensors)[:3]
            raise CheckpointError("piece 4 is damaged")

        whole = read_saved(run, folder, digests)
        return WeightStream(whole.layout, tensors())

    monkeypatch.setattr(LocalBackendConfig, "checkpoint_reader", "a:b")
    choose: Callable[[str, str], object] = lambda reference, what: fail  # noqa: E731
    monkeypatch.setattr(export, "resolve", choose)
    with pytest.raises(CheckpointError, match="piece 4"):
        export_run(loaded, tmp_path / "exported")
    assert set(tmp_path.iterdir()) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
