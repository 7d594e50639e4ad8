"""Apply `--set key.path=value` to a document before it is validated.

Values are YAML, so `a=1e-5` is a float and `a=[1]` a list. A path may go through lists by index, and through settings
that the file writes in short: `collator: packed` or `data.train: rows.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

from spurline.config.document import Document, parse_value
from spurline.config.shorthand import BARE, as_list
from spurline.errors import ConfigError, Problem


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Change `document` in place. Raises ConfigError for text that is no override or goes nowhere."""
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not all(key.split(".")):
            raise _error("", f"'{override}' is not KEY=VALUE, such as 'optimizer.learning_rate=1e-4'.")
        try:
            value = parse_value(text)
        except ValueError as error:
            raise _error(key, f"value {text!r} is not valid YAML: {error}.") from None
        _assign(document.values, key.split("."), value, override)
        document.forget_lines(key)
        document.overridden[key] = override


def _assign(values: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    node: Any = values
    for part, following in pairwise(path):
        child = _opened(node, part, following, override)
        _put(node, part, child, override)
        node = child
    _put(node, path[-1], value, override)


def _put(node: dict[str, Any] | list[Any], part: str, value: Any, override: str) -> None:
    if isinstance(node, list):
        node[_index(node, part, override)] = value
    else:
        node[part] = value


def _opened(node: dict[str, Any] | list[Any], part: str, following: str, override: str) -> Any:
    """What is under `part`, as a mapping or list that the next part of the path can go into."""
    child: Any = node[_index(node, part, override)] if isinstance(node, list) else node.get(part)
    if child is None:
        return {}
    if following == "0" and not (isinstance(child, dict) and following in child):
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
