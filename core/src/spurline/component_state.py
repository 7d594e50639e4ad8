"""A component's state on disk: JSON for structure and scalars, safetensors for arrays. No pickle.

State is nested dicts and lists of JSON values and numpy arrays. Arrays (tokens and logprobs of finished rollouts, say)
go to NAME.safetensors; NAME.json refers to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from spurline.durable import write_json

_REFERENCE = "__array__"


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Write `path`.json and, when there are arrays, `path`.safetensors."""
    arrays: dict[str, NDArray[Any]] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path.with_suffix(".json"), {"state": _take_out(state, arrays)})
    if arrays:
        save_file(arrays, path.with_suffix(".safetensors"))


def read_state(path: Path) -> dict[str, object]:
    """What `write_state` wrote. Raises FileNotFoundError when there is none."""
    content = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["state"]
    arrays_path = path.with_suffix(".safetensors")
    return _put_back(content, load_file(arrays_path) if arrays_path.exists() else {})


def _take_out(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    if isinstance(value, np.ndarray):
        key = str(len(arrays))
        arrays[key] = np.ascontiguousarray(value)
        return {_REFERENCE: key}
    if isinstance(value, Mapping):
        return {str(name): _take_out(item, arrays) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_take_out(item, arrays) for item in value]
    return value


def _put_back(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_REFERENCE}:
            return arrays[value[_REFERENCE]]
        return {name: _put_back(item, arrays) for name, item in value.items()}
    if isinstance(value, list):
        return [_put_back(item, arrays) for item in value]
    return value
