"""Leave secrets out of what is written down about a config: run directory, checkpoints, report and trackers.

A config should hold no secrets, but settings that pass variables and arguments on, and addresses, can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

HIDDEN = "(hidden)"
"""The text that stands for a secret."""

_NAME = re.compile(
    # Of an environment variable, or of a setting or argument; `eos_token` and `sort_key` are none.
    r"[A-Z0-9_]*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)|token|[Aa]uthorization"
    r"|([\w-]+[_-])?(api[_-]?key|(hf|access|auth)[_-]token|password|passwd|secret)"
)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def hide_secrets(value: Any) -> Any:
    """A copy of these plain JSON values in which texts by the name of a secret, also several in a list, and logins in
    URLs, are HIDDEN."""
    if isinstance(value, Mapping):
        values = cast("Mapping[str, Any]", value)
        return {
            name: HIDDEN if _NAME.fullmatch(name) and _has_text(inner) else hide_secrets(inner)
            for name, inner in values.items()
        }
    if isinstance(value, (list, tuple)):
        return [hide_secrets(inner) for inner in cast("list[Any]", value)]
    return _LOGIN_IN_URL.sub(HIDDEN, value) if isinstance(value, str) else value


def _has_text(value: Any) -> bool:
    """Return whether it is a text or a list with one; empty ones, numbers and sections are no secrets."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(inner, str) and inner for inner in cast("list[Any]", value))
    return isinstance(value, str) and bool(value)
