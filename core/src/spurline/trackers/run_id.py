"""The id under which a tracker's service knows a run, kept in the run directory."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from spurline.files import replace_file


def stored_run_id(run_dir: Path, file: str, *, is_resumed: bool) -> str:
    """The id in `run_dir/file` when resuming, else a new one, stored first: letters, digits, `-` and `_`.

    A run that starts over gets a new id: what came before it would stand among its steps.
    """
    stored = read_run_id(run_dir, file) if is_resumed else None
    if stored is not None:
        return stored
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", run_dir.resolve().name).strip("-")[:40] or "run"
    run_id = f"{name}-{secrets.token_hex(4)}"
    store_run_id(run_dir, file, run_id)
    return run_id


def read_run_id(run_dir: Path, file: str) -> str | None:
    """What `store_run_id` stored, if anything."""
    path = run_dir / file
    return (path.read_text(encoding="utf-8").strip() or None) if path.exists() else None


def store_run_id(run_dir: Path, file: str, run_id: str) -> None:
    """Keep an id that the service chose."""
    replace_file(run_dir / file, f"{run_id}\n")
