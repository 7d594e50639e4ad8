"""Replacing files for trackers and the report, with errors that tell a user what to do about them. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from spurline.durable import write_text
from spurline.errors import RunFailedError


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and durably. Raises RunFailedError; the old file is then untouched."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise write_failure(path, error) from error


def write_failure(path: Path, error: OSError) -> RunFailedError:
    """The error for a file that cannot be written: which file, why, how much space is left, what to do."""
    folder = next((parent for parent in path.parents if parent.is_dir()), Path("/"))
    free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free on that disk"
    return RunFailedError(
        f"{path}: cannot be written: {error.strerror or error} ({free}). Free some space or make the folder writable, "
        "then resume the run; everything up to the last checkpoint is intact."
    )
