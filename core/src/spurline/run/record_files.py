"""Names and reading of the files that a run leaves for people.

Trackers and checkpoints have files of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spurline.errors import RunDirectoryError, listing
from spurline.files import regular_file
from spurline.trackers.jsonl import METRICS_FILE

CONFIG_FILE = "config.json"
"""The resolved config, inside the run directory."""
SUMMARY_FILE = "summary.json"
"""Data counts, versions and status, inside the run directory."""


def check_run_directory(run_dir: Path) -> None:
    """Raise RunDirectoryError if the folder is missing or is no run directory. The error names runs inside it."""
    if not run_dir.is_dir():
        raise RunDirectoryError(f"{run_dir}: no such folder. Give the run_dir of a run, such as runs/default.")
    if not _holds_a_run(run_dir):
        entries = sorted(run_dir.iterdir())
        runs = [str(entry) for entry in entries if entry.is_dir() and _holds_a_run(entry)]
        found = f"Runs in it: {listing(runs)}" if runs else f"It has: {listing(entry.name for entry in entries[:20])}"
        raise RunDirectoryError(
            f"{run_dir}: not a run directory: no {METRICS_FILE} or {SUMMARY_FILE} of a run. {found}."
        )


def _holds_a_run(folder: Path) -> bool:
    # The config.json in a folder may be a model's.
    return any((folder / name).exists() for name in (METRICS_FILE, SUMMARY_FILE))


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; a missing one is empty. Raises RunDirectoryError for anything else."""
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
