"""Look after the cache folder: what is in it, whether it is whole, and what can go.

Needs no tokenizer and no config. Folders that are no entries (being written, or being removed) start with a dot. An
entry that is replaced or removed is renamed first, so that no reader sees half of it; processes of this machine that
have it mapped keep reading it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from spurline.errors import DataError
from spurline.files import remove as remove_path
from spurline_collation_fast.cache.entry import MANIFEST, DamagedEntry, Manifest, check_content, open_entry
from spurline_text import own_folder

WRITING = ".writing-"
"""Begins the name of a folder that a writer fills and holds a lock on."""
_REMOVED = ".removed-"
_KEY = re.compile(r"[0-9a-f]{32}")
_DAY_S = 86400


@dataclass(frozen=True)
class Entry:
    """One entry. manifest: None when it cannot be read, and then `problem` says why. is_damaged: whether it never
    can be. last_used: seconds since 1970."""

    path: Path
    manifest: Manifest | None
    problem: str | None
    is_damaged: bool
    num_bytes: int
    last_used: float

    @property
    def days_unused(self) -> float:
        """Days since a run last opened the entry."""
        return (time.time() - self.last_used) / _DAY_S


def entries(folder: Path) -> list[Entry]:
    """Return all entries, the last used first; reads no tokens. Raises DataError."""
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(
            f"{folder}: the token cache cannot be listed: {error.strerror or error}. Make the folder readable, or "
            "choose another one: `--cache-dir`, in a run tokenization.cache_dir."
        ) from error
    found = [_entry(path) for path in paths if _KEY.fullmatch(path.name)]
    return sorted((entry for entry in found if entry is not None), key=lambda entry: -entry.last_used)


def damage(path: Path) -> str | None:
    """Read an entry as a whole; return what is wrong with it, or None. Raises OSError when it cannot be read."""
    try:
        open_entry(path, Manifest.read(path).labels)
        check_content(path)
    except DamagedEntry as found:
        return str(found)
    return None


def remove(entry: Path) -> None:
    """Remove an entry; it disappears under its name at once. Does nothing when another process was faster.

    Raises OSError when it cannot be renamed.
    """
    aside = entry.with_name(f"{_REMOVED}{entry.name}-{secrets.token_hex(4)}")
    try:
        entry.rename(aside)
    except FileNotFoundError:
        return
    # Nobody finds it any more. Files that a reader has mapped over NFS keep the folder there: a later sweep takes it.
    with contextlib.suppress(OSError):
        remove_path(aside)


def may_remove(entry: Path) -> bool:
    """Tell whether this process may rename what is there: in a folder like /tmp only its owner may. Raises OSError."""
    try:
        folder, found = entry.parent.stat(), entry.stat()
    except FileNotFoundError:
        return True
    return not folder.st_mode & stat.S_ISVTX or os.geteuid() in (0, folder.st_uid, found.st_uid)


def sweep(folder: Path) -> None:
    """Remove what killed writers have left: folders without a lock, and entries that were being removed."""
    own_folder.sweep(folder, WRITING)
    for path in folder.glob(f"{_REMOVED}*"):
        # Another process may be at it, and another user's stays.
        with contextlib.suppress(OSError):
            remove_path(path)


def _entry(path: Path) -> Entry | None:
    """Return None for one that another process removes in this moment."""
    manifest = problem = None
    try:
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        last_used = path.stat().st_mtime
        with contextlib.suppress(FileNotFoundError):
            last_used = (path / MANIFEST).stat().st_mtime
        manifest = Manifest.read(path)
    except DamagedEntry as found:
        problem = f"damaged: {found}"
    except FileNotFoundError:
        return None
    except OSError as error:
        return Entry(path, None, f"cannot be read: {error.strerror or error}", False, 0, time.time())
    return Entry(path, manifest, problem, manifest is None, num_bytes, last_used)
