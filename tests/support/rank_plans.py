"""Plans of runs on many ranks, on configs of published models without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from spurline.config.loading import load_config
from spurline_planning.plan import Plan, make_plan

PUBLISHED = Path(__file__).parents[1] / "plugins/megatron_backend/published"
"""Folder of `config.json` files of large models."""


def published(name: str) -> PretrainedConfig:
    return AutoConfig.for_model(**json.loads((PUBLISHED / f"{name}.json").read_text()))


def config_of(name: str, model: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """Return the config of a run with the backend of this name on eight GPUs."""
    return {
        "plugins": [f"{name}_backend"],
        "run_dir": str(folder / "run"),
        "model": {"path": str(model)},
        "data": {"train": str(rows), "max_length": 64},
        "batch_size": 16,
        "steps": 2,
        "collator": {"name": "packed", "max_tokens": 64},
        "backend": {"name": name, "device": "cuda", "ranks": 8, "precision": "bf16"},
    }


def planned(config: dict[str, Any], *, gib: float | None = None, **backend: Any) -> Plan:
    loaded = load_config({**config, "backend": {**config["backend"], **backend}})
    return make_plan(loaded, device_bytes=None if gib is None else int(gib * 2**30))


def with_model(config: dict[str, Any], folder: Path, model_config: str) -> dict[str, Any]:
    """Return the config with a model of this `config.json`, the tiny tokenizer and no weights."""
    folder.mkdir()
    for file in Path(config["model"]["path"]).iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(model_config)
    return config | {"model": {"path": str(folder), "init": "random"}}
