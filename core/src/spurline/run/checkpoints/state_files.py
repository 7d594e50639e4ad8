"""Write and read the state of a component, without pickle.

A state is nested dicts and lists of JSON values and numpy arrays. NAME.json contains the structure. NAME.safetensors
contains the arrays, each named after its keys, such as `weights/embed`. Each part of a `StateParts`, such as a
finished group of rollouts, has its own files: NAME.parts/0/00000.json and so on. Parts are written and read one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from spurline.digests import FileDigest
from spurline.errors import DamagedCheckpointError, RunFailedError
from spurline.files import json_text, remove, write_text
from spurline.protocols.stateful import StateParts
from spurline.tensor_files import can_hold, values_of_array, write_tensor_file

_REFERENCE = "__array__"
"""Key that refers to an array in the structure. Its value is the name of the array."""
_PARTS = "__parts__"
"""Key that refers to a `StateParts`. Its value is the index of the `StateParts`, after which its folder is named."""
_STANDS_FOR = {_REFERENCE: "an array", _PARTS: "parts"}
_RESERVED_NAMES = ("", "__metadata__")
"""Names that an array cannot have in a safetensors file."""

_PLAIN = (str, int, float, bool, type(None))


def write_state(path: Path, state: Mapping[str, object], owner: str | None = None) -> dict[str, FileDigest]:
    """Write a state to `path`.json, its arrays to `path`.safetensors and its parts below `path`.parts.

    The JSON file is written last, so a state without it is incomplete.

    Args:
        path: The common path of the files, without a suffix.
        state: The result of `state_dict`.
        owner: The state's name in messages, such as `'average' of plugin 'ema'`. If None, it is made from `path`.

    Returns:
        The digest of each file, by its path relative to the folder of `path`. All files are on disk (fsync).

    Raises:
        RunFailedError: If a value cannot be saved. The error names the value.
    """
    digests: dict[Path, FileDigest] = {}
    try:
        if not isinstance(state, Mapping):
            raise TypeError(f"it is a {type(state).__qualname__}")
        _write(path, state, (), digests)
    except TypeError as error:
        raise RunFailedError(
            f"The state {owner or f'of {path.parent.name}/{path.name}'} cannot be saved: {error}. `state_dict` must "
            "return nested dicts and lists of JSON values and numpy arrays of numbers. Keys must be text."
        ) from error
    return {str(file.relative_to(path.parent)): digest for file, digest in digests.items()}


def copied_state(value: Any) -> Any:
    """Return a deep copy of the result of `state_dict`. A `StateParts` is copied only if it is not frozen."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, StateParts):
        if value.is_frozen:
            return value
        parts: list[Mapping[str, object]] = [copied_state(part) for part in value]
        return StateParts(lambda: iter(parts), is_frozen=True)
    if isinstance(value, Mapping):
        return {key: copied_state(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied_state(item) for item in value]
    return value


def _write(path: Path, state: Mapping[str, object], keys: tuple[str, ...], digests: dict[Path, FileDigest]) -> None:
    """Write one state, and add the digests of its files. `keys` is its path in the outermost state, for messages."""
    structure, arrays_path, parts_path = _state_paths(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Remove an earlier state with its arrays and parts.
    for earlier in (structure, arrays_path, parts_path):
        remove(earlier)
    taken = _TakenOut({}, [])
    content = taken.replaced(state, keys)
    if taken.arrays:
        arrays = {name: values_of_array(array) for name, array in taken.arrays.items()}
        digests[arrays_path] = write_tensor_file(arrays_path, arrays, {})
    counts = [_write_parts(parts_path / str(number), *found, digests) for number, found in enumerate(taken.parts)]
    text = json_text({"state": content, **({"parts": counts} if counts else {})})
    write_text(structure, text)
    digests[structure] = FileDigest.of(text.encode("utf-8"))


def _write_parts(folder: Path, parts: StateParts, keys: tuple[str, ...], digests: dict[Path, FileDigest]) -> int:
    count = 0
    for part in parts:
        _write(folder / f"{count:05d}", part, (*keys, str(count)), digests)
        count += 1
    return count


def read_state(path: Path) -> dict[str, object]:
    """Read a state that `write_state` wrote. Parts are read while they are iterated over.

    Raises FileNotFoundError if there is no such state, and DamagedCheckpointError if its files are damaged.
    """
    structure, arrays_path, parts_path = _state_paths(path)
    text = structure.read_bytes()
    try:
        content = json.loads(text)
        parts = [
            StateParts(partial(_read_parts, parts_path / str(number), count))
            for number, count in enumerate(content.get("parts", []))
        ]
        return _put_back(content["state"], load_file(arrays_path) if arrays_path.exists() else {}, parts)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise DamagedCheckpointError(
            f"{structure} is damaged, or does not belong to the files beside it ({type(error).__name__}: {error})."
        ) from error


def _read_parts(folder: Path, count: int) -> Iterator[Mapping[str, object]]:
    return (read_state(folder / f"{number:05d}") for number in range(count))


def _state_paths(path: Path) -> tuple[Path, Path, Path]:
    # Do not use with_suffix, since a component's name may contain dots.
    structure, arrays, parts = (path.with_name(path.name + suffix) for suffix in (".json", ".safetensors", ".parts"))
    return structure, arrays, parts


@dataclass(frozen=True)
class _TakenOut:
    """The arrays (by name) and the `StateParts` (with their keys) of a state, which JSON cannot represent."""

    arrays: dict[str, NDArray[Any]]
    parts: list[tuple[StateParts, tuple[str, ...]]]

    def replaced(self, value: Any, keys: tuple[str, ...]) -> Any:
        """Add arrays and `StateParts` to this object, and return the value with references in their place."""
        if isinstance(value, np.ndarray):
            if not can_hold(value):
                raise TypeError(f"{_way(keys)} is an array of {value.dtype}")
            name = _free_name("/".join(keys), self.arrays)
            self.arrays[name] = np.asarray(value, order="C")
            return {_REFERENCE: name}
        if isinstance(value, StateParts):
            self.parts.append((value, keys))
            return {_PARTS: len(self.parts) - 1}
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"{_way(keys)} has the key {key!r}, which is not text")
                if key in _STANDS_FOR:
                    raise TypeError(f"{_way(keys)} has the key {key!r}, which the file uses for {_STANDS_FOR[key]}")
            return {key: self.replaced(item, (*keys, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.replaced(item, (*keys, str(number))) for number, item in enumerate(value)]
        if not isinstance(value, _PLAIN):
            raise TypeError(f"{_way(keys)} is a {type(value).__module__}.{type(value).__qualname__}")
        return value


def _way(keys: tuple[str, ...]) -> str:
    return "/".join(keys) or "it"


def _free_name(wanted: str, taken: Mapping[str, object]) -> str:
    """Return an unused name for an array: `wanted`, or else `wanted~N` with the smallest unused N from 2."""
    # UTF-8 cannot encode half of a surrogate pair.
    wanted = wanted.encode("utf-8", "replace").decode("utf-8")
    name, number = wanted, 1
    while name in taken or name in _RESERVED_NAMES:
        number += 1
        name = f"{wanted}~{number}"
    return name


def _put_back(value: Any, arrays: Mapping[str, NDArray[Any]], parts: Sequence[StateParts]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_REFERENCE}:
            return arrays[value[_REFERENCE]]
        if value.keys() == {_PARTS}:
            return parts[value[_PARTS]]
        return {name: _put_back(item, arrays, parts) for name, item in value.items()}
    if isinstance(value, list):
        return [_put_back(item, arrays, parts) for item in value]
    return value
