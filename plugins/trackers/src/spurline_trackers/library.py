"""Import the library of a tracker when the tracker is built: `pip install spurline` brings none of them."""

from __future__ import annotations

import importlib
from typing import Any

from spurline.errors import ConfigError, Problem


def tracker_library(name: str, module: str | None = None) -> Any:
    """Return the library of tracker `name`, or a module of it. Raises ConfigError with the command that installs it."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        text = (
            f"'{name}' needs the {name} library, which cannot be imported ({error}). Install it: "
            f"pip install 'spurline-trackers[{name}]'"
        )
        raise ConfigError([Problem("trackers", text)]) from error
