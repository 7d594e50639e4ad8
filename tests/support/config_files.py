"""Configs that a test writes and loads, with the components of core's tests or with the plugins' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from spurline import load_config
from spurline.config.loading import LoadedConfig
from spurline.errors import ConfigError

MINIMAL = "model: {path: m}\ndata: {train: rows.jsonl}\nsteps: 3\n"
BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 3}

Failing = Callable[..., list[str]]
"""The fixture `failing`: text of a config and overrides -> lines of the error."""


def resolved(*overrides: str, **settings: Any) -> dict[str, Any]:
    return load_config({**BASE, **settings}, overrides).resolved()


def message(*overrides: str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config({**BASE, **settings}, overrides)
    return str(caught.value)


def load(project: Path, **settings: str) -> LoadedConfig:
    """Load a config in the folder of the fixture `project`."""
    values = {"model.path": "org/model", "data.train": "org/rows", **settings}
    (project / "configs" / "run.yaml").write_text("steps: 1\n", encoding="utf-8")
    return load_config(project / "configs" / "run.yaml", [f"{key}={value}" for key, value in values.items()])


def merged(base: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the config with the setting at a dotted path replaced."""
    first, _, rest = path.partition(".")
    if not rest:
        return {**base, first: value}
    inner = base.get(first, {})
    return {**base, first: merged({"name": inner} if isinstance(inner, str) else inner, rest, value)}
