"""Read a config file into plain values with the line number of every key, and apply the overrides of `--set`.

The file is YAML 1.2, or TOML if its name ends in `.toml`. Values of `--set key.path=value` are YAML: `a=[1]` is a list.
A key path may contain list indices, and lead into short forms such as `collator: packed` or `data.train: rows.jsonl`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarbool import ScalarBoolean

from spurline.config.section import BARE, as_list
from spurline.errors import ConfigError, Problem, listing


@dataclass
class Document:
    """A config file's content.

    Attributes:
        origin: File name as the user gave it, for error messages.
        values: The settings.
        lines: 1-based line of each dotted key path. Empty for TOML and for mappings given from Python.
        overridden: The `--set` text that replaced the value at a key path.
    """

    origin: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict[str, int])
    overridden: dict[str, str] = field(default_factory=dict[str, str])

    def override_of(self, key: str) -> str | None:
        """Return the `--set` text that gave the value at this key path or created the mapping there, or None."""
        if key and key not in self.lines:
            made = next((text for path, text in self.overridden.items() if path.startswith(f"{key}.")), None)
            if made is not None:
                return made
        while key:
            if key in self.overridden:
                return self.overridden[key]
            key = key.rpartition(".")[0]
        return None


def read_document(path: Path) -> Document:
    """Parse the file. Raises ConfigError for a missing file, a syntax error, a duplicate key or a non-mapping."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError([Problem("", _missing(path))], str(path)) from None
    except IsADirectoryError:
        raise ConfigError([Problem("", f"is a folder. Configs in it: {_configs_in(path)}.")], str(path)) from None
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error}.")], str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"is not UTF-8 text ({error.reason}). Save it as UTF-8.")], str(path)) from error
    if path.suffix.lower() == ".toml":
        try:
            return Document(str(path), tomllib.loads(text))
        except ValueError as error:
            raise ConfigError([Problem("", f"is not valid TOML: {error}.")], str(path)) from None
    loaded = _parse_yaml(text, str(path), "is not valid YAML")
    if loaded is None:
        loaded = CommentedMap()
    if not isinstance(loaded, CommentedMap):
        raise ConfigError([Problem("", "must be a mapping of settings, such as `model: {path: ...}`.")], str(path))
    lines: dict[str, int] = {}
    _collect_lines(loaded, "", lines)
    return Document(str(path), plain(loaded), lines)


def _parse_yaml(text: str, origin: str, what: str) -> Any:
    """Parse the text into ruamel's containers, which store line numbers. Return None for empty text.

    ruamel reads YAML 1.2, where 1e-5 is a float, and refuses duplicate keys. A ConfigError's text begins with `what`.
    """
    try:
        return cast("Any", YAML(typ="rt")).load(text)
    except Exception as error:
        # The parser also raises other errors, such as ValueError for a date that does not exist.
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = str(getattr(error, "problem", None) or str(error).strip().partition("\n")[0]).rstrip(".")
        place = origin if mark is None else f"{origin}:{mark.line + 1}"
        raise ConfigError([Problem("", f"{what}: {problem}.")], place) from error


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


def plain(node: Any) -> Any:
    """Return a copy with plain dicts, lists and scalars in place of ruamel's types."""
    if isinstance(node, Mapping):
        return {str(key): plain(value) for key, value in cast("Mapping[Any, Any]", node).items()}
    if isinstance(node, (list, tuple)):
        return [plain(value) for value in cast("Sequence[Any]", node)]
    if isinstance(node, ScalarBoolean):
        return bool(node)
    # Leave other subclasses of str and int alone, such as enums that a Python program passes.
    if type(node).__module__.startswith("ruamel."):
        return next((base(node) for base in (int, float, str) if isinstance(node, base)), node)
    return node


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"does not exist; neither does its folder '{path.parent}'. `spurline init` writes a config."
    return f"does not exist. Config files in '{path.parent}': {_configs_in(path.parent)}. `spurline init` writes one."


def _configs_in(folder: Path) -> str:
    return listing(entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml", ".toml"})


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply `--set` texts to `document`. Raises ConfigError if one is malformed or its path cannot be followed."""
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not all(key.split(".")):
            raise _error(f"'{override}' is not KEY=VALUE, such as 'optimizer.learning_rate=1e-4'.")
        value = plain(_parse_yaml(text, "--set", f"{override!r} is not valid YAML"))
        node: Any = document.values
        path = key.split(".")
        for part, following in pairwise(path):
            child = _opened(node, part, following, override)
            _put(node, part, child, override)
            node = child
        _put(node, path[-1], value, override)
        # The lines of the file have the value that was replaced.
        document.lines = {at: line for at, line in document.lines.items() if not f"{at}.".startswith(f"{key}.")}
        document.overridden[key] = override


def _put(node: dict[str, Any] | list[Any], part: str, value: Any, override: str) -> None:
    if isinstance(node, list):
        node[_index(node, part, override)] = value
    else:
        node[part] = value


def _opened(node: dict[str, Any] | list[Any], part: str, following: str, override: str) -> Any:
    """Return the value of the key or index `part` as a mapping or list, to which the next part of the path applies."""
    child: Any = node[_index(node, part, override)] if isinstance(node, list) else node.get(part)
    if child is None:
        return {}
    # A single value may stand for a list of one item, which `0` selects. A mapping may instead have the key `0`.
    is_one = following == "0" and not (isinstance(child, dict) and following in child)
    if is_one or (isinstance(child, str) and following.isdecimal()):
        child = as_list(child)
    if isinstance(child, str):
        # `collator: packed` is short for {name: packed}. An override of collator.max_tokens must keep the name.
        return {BARE: child}
    if isinstance(child, (dict, list)):
        return cast("Any", child)
    raise _error(f"'{override}': '{part}' is the value {child!r}, and has no settings in it.")


def _index(items: list[Any], part: str, override: str) -> int:
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    if not items:
        raise _error(f"'{override}': there is no item '{part}' in an empty list.")
    raise _error(f"'{override}': '{part}' must be an index from 0 to {len(items) - 1}.")


def _error(message: str) -> ConfigError:
    return ConfigError([Problem("", message)], "--set")
