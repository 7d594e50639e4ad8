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
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from spurline.durable import write_json
from spurline.errors import CheckpointWriteError, RunFailedError

_REFERENCE = "__array__"


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Write `path`.json and, when there are arrays, `path`.safetensors."""
    arrays: dict[str, NDArray[Any]] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_json(_json_path(path), {"state": _take_out(state, arrays)})
        if arrays:
            save_file(arrays, _arrays_path(path))
    except SafetensorError as error:
        raise CheckpointWriteError(f"{path.name}: {error}") from error
    except TypeError as error:
        raise RunFailedError(
            f"The state of {path.parent.name}/{path.name} cannot be saved: {error}. `state_dict` returns nested dicts "
            "and lists of JSON values and numpy arrays of numbers."
        ) from error


def read_state(path: Path) -> dict[str, object]:
    """What `write_state` wrote. Raises FileNotFoundError when there is none."""
    content = json.loads(_json_path(path).read_text(encoding="utf-8"))["state"]
    arrays_path = _arrays_path(path)
    return _put_back(content, load_file(arrays_path) if arrays_path.exists() else {})


def _json_path(path: Path) -> Path:
    # Not with_suffix: a component's name may hold dots.
    return path.with_name(f"{path.name}.json")


def _arrays_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.safetensors")


def _take_out(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    if isinstance(value, np.ndarray):
        key = str(len(arrays))
        arrays[key] = np.asarray(value, order="C")
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
