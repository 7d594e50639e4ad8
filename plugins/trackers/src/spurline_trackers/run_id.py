"""The id under which a tracker's service knows a run, kept in the run directory."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from spurline.files import replace_file
from spurline.protocols.tracker import RunInfo


def stored_run_id(run_dir: Path, file: str, *, is_resumed: bool) -> str:
    """The id in `run_dir/file` when resuming, else a new one.

    A run that starts over gets a new id: what came before it would stand among its steps.
    """
    return (_read(run_dir / file) if is_resumed else None) or new_run_id(run_dir, file)


def earlier_run_id(info: RunInfo, file: str) -> str | None:
    """The id in this file of the run directory when resuming; None where the run starts over, or has had none."""
    return _read(info.run_dir / file) if info.is_resumed else None


def new_run_id(run_dir: Path, file: str, begin: str | None = None) -> str:
    """An id that no other run has, stored.

    begin: what comes before its own characters; default is the name of run_dir, as letters, digits, `-` and `_`.
    """
    name = begin or re.sub(r"[^A-Za-z0-9_-]+", "-", run_dir.resolve().name).strip("-")[:40] or "run"
    return store_run_id(run_dir, file, f"{name}-{secrets.token_hex(4)}")


def store_run_id(run_dir: Path, file: str, run_id: str) -> str:
    """Keep an id that the service chose, or takes; returns it."""
    replace_file(run_dir / file, f"{run_id}\n")
    return run_id


def _read(path: Path) -> str | None:
    return (path.read_text(encoding="utf-8").strip() or None) if path.exists() else None
