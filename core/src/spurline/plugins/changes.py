"""Say what has changed in the plugin interface, and where names are now. `changes.toml` has the list."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _versions() -> Mapping[int, Mapping[str, Any]]:
    text = Path(__file__).with_name("changes.toml").read_text(encoding="utf-8")
    return {int(version): changes for version, changes in tomllib.loads(text).items()}


def changes_since(api: int) -> str:
    """Return the changes after a version of the interface, a line for each, or an empty string."""
    later = [(version, changes) for version, changes in sorted(_versions().items()) if version > api]
    lines = [f"- {line}" for _, changes in later for line in changes["changed"]]
    return "\n".join(["", f"Changed since interface {api}:", *lines]) if lines else ""


def where_now(error: BaseException) -> str:
    """Return the present place of a name of Spurline that an import did not find, or an empty string."""
    if not isinstance(error, ImportError) or error.name is None:
        return ""
    found = re.search(r"cannot import name '(\w+)'", str(error))
    name = f"{error.name}.{found[1]}" if found else error.name
    for version, changes in _versions().items():
        for old, new in changes["moved"].items():
            if name == old or name.startswith(f"{old}."):
                return f" Since interface {version}, {old} is {new}."
    return ""
