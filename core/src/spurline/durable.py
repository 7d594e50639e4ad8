"""Write files so that a kill or a power cut leaves either the old content or the new, never a mixture."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def sync_file(path: Path) -> None:
    """Force a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically and durably, encoded as UTF-8."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_file(path.parent)


def share(path: Path) -> None:
    """Give a file the permissions that the umask leaves; some libraries create theirs readable by the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically and durably."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")
