"""Read a config file (YAML 1.2, or TOML by suffix) into plain values, remembering the line of every key.

Place on the way: file -> Document -> `config.loading` -> RunConfig. Nothing here knows what a setting means.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from spurline.errors import ConfigError, Problem


@dataclass
class Document:
    """A config file's content.

    origin: file name as the user gave it, for error messages.
    lines: 1-based line of each dotted key path; empty for TOML and for mappings given from Python.
    """

    origin: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict[str, int])


def read_document(path: Path) -> Document:
    """Parse the file. Raises ConfigError for a missing file, a syntax error, a duplicate key or a non-mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([Problem("", _missing(path))], str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", f"cannot be read: {error}.")], str(path)) from error
    if path.suffix.lower() == ".toml":
        return _read_toml(path, text)
    return _read_yaml(path, text)


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply `key.path=value` strings in place; values are parsed as YAML, so `a=1e-5` is a float and `a=[1]` a list."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not all(key.split(".")):
            raise ConfigError(
                [Problem("", f"'{override}' is not KEY=VALUE, such as 'optimizer.learning_rate=1e-4'.")], "--set"
            )
        try:
            value = _plain(_yaml().load(text))
        except YAMLError as error:
            raise ConfigError(
                [Problem(key, f"value {text!r} is not valid YAML: {_first_line(error)}.")], "--set"
            ) from None
        _assign(document.values, key.split("."), value, override)


def _assign(values: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    node: Any = values
    for part in path[:-1]:
        node = _descend(node, part, override)
    last = path[-1]
    if isinstance(node, list):
        node[_index(cast("list[Any]", node), last, override)] = value
    else:
        node[last] = value


def _descend(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        items = cast("list[Any]", node)
        return items[_index(items, part, override)]
    child = node.get(part)
    if isinstance(child, str):
        # `collator: packed` is shorthand for {name: packed}; setting collator.max_tokens must keep the name.
        child = {"name": child}
        node[part] = child
    elif child is None:
        child = {}
        node[part] = child
    elif not isinstance(child, (dict, list)):
        raise ConfigError([Problem("", f"'{override}' goes through '{part}', which is the value {child!r}.")], "--set")
    return cast("Any", child)


def _index(items: list[Any], part: str, override: str) -> int:
    if part.isdigit() and int(part) < len(items):
        return int(part)
    raise ConfigError(
        [Problem("", f"'{override}' needs an index from 0 to {len(items) - 1} where it says '{part}'.")], "--set"
    )


def _read_toml(path: Path, text: str) -> Document:
    try:
        return Document(str(path), tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([Problem("", f"is not valid TOML: {error}.")], str(path)) from None


def _read_yaml(path: Path, text: str) -> Document:
    try:
        loaded = _yaml().load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError([Problem("", f"is not valid YAML: {_first_line(error)}.")], place) from None
    except YAMLError as error:
        raise ConfigError([Problem("", f"is not valid YAML: {_first_line(error)}.")], str(path)) from None
    if loaded is None:
        loaded = CommentedMap()
    if not isinstance(loaded, CommentedMap):
        raise ConfigError([Problem("", "must be a mapping of settings, such as `model: {path: ...}`.")], str(path))
    lines: dict[str, int] = {}
    _collect_lines(loaded, "", lines)
    return Document(str(path), _plain(loaded), lines)


def _yaml() -> YAML:
    # Round-trip mode is YAML 1.2 (1e-5 is a float, `on` is a string), refuses duplicate keys and keeps line numbers.
    return YAML(typ="rt")


def _collect_lines(node: Any, prefix: str, lines: dict[str, int]) -> None:
    items: list[tuple[str, Any, Any]]
    if isinstance(node, CommentedMap):
        items = [(str(key), key, child) for key, child in cast("dict[Any, Any]", node).items()]
    elif isinstance(node, CommentedSeq):
        items = [(str(index), index, child) for index, child in enumerate(cast("list[Any]", node))]
    else:
        return
    places: dict[Any, Any] = cast("Any", node).lc.data or {}
    for name, key, child in items:
        path = f"{prefix}.{name}" if prefix else name
        position = places.get(key)
        if position is not None:
            lines[path] = int(position[0]) + 1
        _collect_lines(child, path, lines)


def _plain(node: Any) -> Any:
    """Drop ruamel's round-trip types, keeping dict, list, str, bool, int, float and None."""
    if isinstance(node, Mapping):
        return {str(key): _plain(value) for key, value in cast("Mapping[Any, Any]", node).items()}
    if isinstance(node, (list, tuple)):
        return [_plain(value) for value in cast("Sequence[Any]", node)]
    if isinstance(node, bool) or node is None:
        return node
    for base in (int, float, str):
        if isinstance(node, base):
            return base(node)
    if type(node).__name__ == "ScalarBoolean":
        return bool(node)
    return node


def _first_line(error: Exception) -> str:
    problem = getattr(error, "problem", None) or str(error).strip().splitlines()[0]
    return str(problem).rstrip(".")


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"does not exist; neither does its folder '{path.parent}'."
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in {".yaml", ".yml", ".toml"})
    found = ", ".join(names) if names else "(none)"
    return f"does not exist. Config files in '{path.parent}': {found}."
