"""Leave secrets out of what is written down about a config: run directory, checkpoints, report and trackers.

A config should hold no secrets, but settings that pass variables and arguments on, and addresses, can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

HIDDEN = "(hidden)"
"""What stands for a secret."""

_NAME = re.compile(
    # Of an environment variable, or of a setting or argument; `eos_token` and `sort_key` are none.
    r"[A-Z0-9_]*(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)|(\w+_)?(api_key|hf_token|access_token|auth_token|password|secret)"
)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def hide_secrets(value: Any) -> Any:
    """A copy of these plain JSON values in which texts by the name of a secret, and logins in URLs, are HIDDEN."""
    if isinstance(value, Mapping):
        values = cast("Mapping[str, Any]", value)
        return {
            name: HIDDEN if isinstance(inner, str) and inner and _NAME.fullmatch(name) else hide_secrets(inner)
            for name, inner in values.items()
        }
    if isinstance(value, (list, tuple)):
        return [hide_secrets(inner) for inner in cast("list[Any]", value)]
    return _LOGIN_IN_URL.sub(HIDDEN, value) if isinstance(value, str) else value
