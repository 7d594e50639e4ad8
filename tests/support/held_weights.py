"""Models whose weights are held in other ways than fp32: their files, adapters over them, and updates to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend_batches import cross_entropy, lay_out, local_backend, make_samples, write_model_folder
from safetensors.torch import load_file, save_file

from spurline.config.run_config import ModelConfig
from spurline_models.configs import LoraConfig
from spurline_models.local.backend import LocalBackend

OBJECTIVE = cross_entropy(9.0)


def write_fp32_files(folder: Path, **config: Any) -> Path:
    """A model whose files hold fp32 values that bf16 does not have. config: as of `write_model_folder`."""
    write_model_folder(folder, **config)
    local_backend(folder)._model.causal.save_pretrained(folder)
    return folder


def round_files(folder: Path) -> Path:
    """The same model with files that hold bf16."""
    (path,) = folder.glob("*.safetensors")
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    return folder


def adapted(folder: Path, base_dtype: str = "auto", **settings: Any) -> LocalBackend:
    """A backend that trains adapters over the weights of this folder."""
    lora = LoraConfig.model_validate({"rank": 4, "alpha": 8.0, "base_dtype": base_dtype})
    return local_backend(folder, lora=lora, run={"model": ModelConfig(path=str(folder))}, **settings)


def train(backend: LocalBackend, steps: range) -> list[dict[str, float]]:
    """Return the metrics of an update for each of these seeds, without times."""
    seen = [backend.update(lay_out(make_samples([9, 12, 5], seed=step)), OBJECTIVE) for step in steps]
    return [{name: value for name, value in metrics.items() if not name.startswith("time/")} for metrics in seen]
