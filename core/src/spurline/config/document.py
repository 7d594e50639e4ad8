"""Read a config file (YAML 1.2, or TOML by suffix) into plain values with the line of every key, and override values.

Place on the way: file -> Document -> `config.loading` -> RunConfig. Nothing here knows what a setting means. Values of
`--set key.path=value` are YAML, so `a=1e-5` is a float and `a=[1]` a list; a path may go through lists by index, and
through settings that the file writes in their short form: `collator: packed` or `data.train: rows.jsonl`.
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

    origin: file name as the user gave it, for error messages.
    lines: 1-based line of each dotted key path; empty for TOML and for mappings given from Python.
    overridden: key path -> the `--set` text that replaced it.
    """

    origin: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict[str, int])
    overridden: dict[str, str] = field(default_factory=dict[str, str])

    def forget_lines(self, key: str) -> None:
        """Drop the line numbers of `key` and of everything under it, since an override replaced their values."""
        for path in [path for path in self.lines if path == key or path.startswith(f"{key}.")]:
            del self.lines[path]

    def override_of(self, key: str) -> str | None:
        """Return the `--set` text that set the value at this key path or created the mapping there, or None."""
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
    """Parse the file. Raises ConfigError for a missing file, a syntax error, a duplicate key, a non-mapping, or a file
    that is data or the config of a model."""
    if path.is_file() and path.suffix.lower() in _DATA:
        raise ConfigError([Problem("", _NOT_DATA.format(path=path))], str(path))
    if describes_a_model(path):
        raise ConfigError([Problem("", _NOT_OF_A_MODEL.format(path=path.parent))], str(path))
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError([Problem("", _missing(path))], str(path)) from None
    except IsADirectoryError:
        is_model = describes_a_model(path / "config.json")
        problem = _NOT_OF_A_MODEL.format(path=path) if is_model else f"is a folder. Configs in it: {_configs_in(path)}."
        raise ConfigError([Problem("", problem)], str(path)) from None
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error}.")], str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"is not UTF-8 text ({error.reason}). Save it as UTF-8.")], str(path)) from error
    if path.suffix.lower() == ".toml":
        return Document(str(path), _parse_toml(text, str(path)))
    try:
        loaded = _parse_yaml(text)
    except _BadYamlError as error:
        place = str(path) if error.line is None else f"{path}:{error.line}"
        raise ConfigError([Problem("", f"is not valid YAML: {error}")], place) from None
    if loaded is None:
        loaded = CommentedMap()
    if not isinstance(loaded, CommentedMap):
        raise ConfigError([Problem("", "must be a mapping of settings, such as `model: {path: ...}`.")], str(path))
    lines: dict[str, int] = {}
    _collect_lines(loaded, "", lines)
    return Document(str(path), plain(loaded), lines)


def _parse_toml(text: str, place: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ConfigError([Problem("", f"is not valid TOML: {error}.")], place) from None


def parse_value(text: str) -> Any:
    """Parse one value as YAML, so `1e-5` is a float and `[1]` a list. Raises ValueError with a readable message."""
    return plain(_parse_yaml(text))


class _BadYamlError(ValueError):
    """A YAML syntax error, described in sentences. line: 1-based; None if the parser names none."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


def _parse_yaml(text: str) -> Any:
    """Return the text as ruamel's containers, which know their lines; None for empty text.

    Its round-trip mode is YAML 1.2 (1e-5 is a float, `on` is a string), refuses duplicate keys and obeys no tags.
    """
    parser = cast("Any", YAML(typ="rt"))
    try:
        return parser.load(text)
    except Exception as error:
        # Not only the parser's own errors come here: a date that does not exist is a ValueError.
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = None if mark is None else mark.line + 1
        position: Any = getattr(error, "position", None)
        if position is not None:
            # The error is a character that YAML does not allow.
            line = text.count("\n", 0, position) + 1
        problem = str(getattr(error, "problem", None) or str(error).strip().partition("\n")[0]).rstrip(".")
        fix = _fix(f"{problem} {getattr(error, 'context', '')}")
        raise _BadYamlError(f"{problem}.{fix}", line) from error


def _fix(problem: str) -> str:
    """Return what usually fixes this error of the parser; empty if nothing is known."""
    if "alias" in problem:
        return " Text that begins with `*` or `&` needs quotes."
    if "'\\t'" in problem:
        return " Indent with spaces, not with tabs."
    if "block" in problem or "mapping values" in problem:
        return (
            " Keys of one level begin in the same column, those of a section further to the right; text with `: ` "
            "needs quotes."
        )
    return ""


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
    """Return a copy in which containers are dict and list, and ruamel's own scalar types are gone."""
    if isinstance(node, Mapping):
        return {str(key): plain(value) for key, value in cast("Mapping[Any, Any]", node).items()}
    if isinstance(node, (list, tuple)):
        return [plain(value) for value in cast("Sequence[Any]", node)]
    if isinstance(node, ScalarBoolean):
        return bool(node)
    # Enums and other named constants that a Python caller passes are str or int too; only ruamel's become plain.
    if type(node).__module__.startswith("ruamel."):
        return next((base(node) for base in (int, float, str) if isinstance(node, base)), node)
    return node


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"does not exist; neither does its folder '{path.parent}'. `spurline init` writes one."
    return f"does not exist. Config files in '{path.parent}': {_configs_in(path.parent)}. `spurline init` writes one."


_NOT_OF_A_MODEL = "is a model and no config. `spurline init --model {path}` writes one, with `model: {{path: {path}}}`."
_NOT_DATA = "is data and no config. `spurline init --data {path}` writes one, with `data: {{train: {path}}}`."
_DATA = frozenset({".jsonl", ".csv", ".parquet", ".arrow"})


def describes_a_model(file: Path) -> bool:
    """Return whether a file is the `config.json` of a model, and not the record that a run leaves under that name."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        head = opened.read(1 << 20)
    return b'"model_type"' in head and b'"run_dir"' not in head


def _configs_in(folder: Path) -> str:
    return listing(entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml", ".toml"})


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply `--set` texts to `document` in place. Raises ConfigError if one is malformed or its path does not exist."""
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not all(key.split(".")):
            raise _error("", f"'{override}' is not KEY=VALUE, such as 'optimizer.learning_rate=1e-4'.")
        try:
            value = parse_value(text)
        except ValueError as error:
            raise _error(key, f"value {text!r} is not valid YAML: {error}") from None
        node: Any = document.values
        path = key.split(".")
        for part, following in pairwise(path):
            child = _opened(node, part, following, override)
            _put(node, part, child, override)
            node = child
        _put(node, path[-1], value, override)
        document.forget_lines(key)
        document.overridden[key] = override


def _put(node: dict[str, Any] | list[Any], part: str, value: Any, override: str) -> None:
    if isinstance(node, list):
        node[_index(node, part, override)] = value
    else:
        node[part] = value


def _opened(node: dict[str, Any] | list[Any], part: str, following: str, override: str) -> Any:
    """Return the value under `part` as a mapping or list, so that the next part of the path can go into it."""
    child: Any = node[_index(node, part, override)] if isinstance(node, list) else node.get(part)
    if child is None:
        return {}
    # A single value may stand for a list of one, so `0` selects it, unless it is a mapping that has `0` as a key.
    is_one = following == "0" and not (isinstance(child, dict) and following in child)
    if is_one or (isinstance(child, str) and following.isdecimal()):
        child = as_list(child)
    if isinstance(child, str):
        # `collator: packed` is shorthand for {name: packed}; setting collator.max_tokens must keep the name.
        return {BARE: child}
    if isinstance(child, (dict, list)):
        return cast("Any", child)
    raise _error("", f"'{override}' goes through '{part}', which is the value {child!r}.")


def _index(items: list[Any], part: str, override: str) -> int:
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    if not items:
        raise _error("", f"'{override}' goes into an empty list where it says '{part}'.")
    raise _error("", f"'{override}' needs an index from 0 to {len(items) - 1} where it says '{part}'.")


def _error(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(key, message)], "--set")
