"""The short ways to write a setting: a bare string for a component, one item for a list of one.

`collator: packed` is `{name: packed}`, `data.train: rows.jsonl` is `[{path: rows.jsonl}]`. Which setting the string
stands for is known only once the model is built, so an override that goes into a bare string keeps it under `BARE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

BARE = "(as written)"
"""Key under which `--set` keeps a bare string that it had to turn into a mapping."""


def expand_shorthand(value: Any, setting: str) -> Any:
    """A bare string as `{setting: string}`; anything else unchanged."""
    if isinstance(value, str):
        return {setting: value}
    if isinstance(value, Mapping) and BARE in value:
        settings = cast("Mapping[str, Any]", value)
        return {setting: settings[BARE], **{key: item for key, item in settings.items() if key != BARE}}
    return cast("Any", value)


def as_list(value: Any) -> Any:
    """A single string or mapping as a list of one, null as an empty list; anything else unchanged."""
    if value is None:
        return []
    return [value] if isinstance(value, (str, dict)) else value
