"""Names of the files that a run leaves for people, and how they are read.

Trackers and checkpoints have files of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spurline.errors import RunDirectoryError
from spurline.files import regular_file

CONFIG_FILE = "config.json"
"""The resolved config, inside the run directory."""


SUMMARY_FILE = "summary.json"
"""Data counts, versions and status, inside the run directory."""


def read_mapping(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a missing one is empty. Raises RunDirectoryError for anything else."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            content = json.loads(file.read())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RunDirectoryError(f"{path}: not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise RunDirectoryError(f"{path}: holds a {type(content).__name__}, expected a JSON object.")
    return content
