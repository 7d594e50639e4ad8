"""Hide secrets in configs that are written to the run directory, checkpoints, reports and trackers.

URLs may contain secrets, and so may settings for environment variables and arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

HIDDEN = "(hidden)"
"""The text that replaces a secret."""

_NAME = re.compile(
    # Names of environment variables, settings and arguments. `eos_token` and `sort_key` are not secrets.
    r"[A-Z0-9_]*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)|token|[Aa]uthorization"
    r"|([\w-]+[_-])?(api[_-]?key|(hf|access|auth)[_-]token|password|passwd|secret)"
)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def hide_secrets(value: Any) -> Any:
    """Return a copy of these JSON values in which HIDDEN replaces secrets.

    Secrets are logins in URLs, and strings or lists of strings under a key that names a secret, such as `api_key`.
    """
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
    inner = cast("list[Any]", value) if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(each, str) and each for each in inner)
