"""Look after the cache folder: what is in it, whether it is whole, and what can go.

In: the folder. Out: facts for the `spurline cache` command, which prints them. Needs no tokenizer and no config.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spurline_collation_fast.cache.layout import MANIFEST, DamagedEntry, Manifest
from spurline_collation_fast.cache.leftovers import is_abandoned, leftovers, retire
from spurline_collation_fast.cache.mapped_store import open_entry

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Entry:
    """One entry. manifest: None when it cannot be read, and then `problem` says why. last_used: seconds since 1970."""

    path: Path
    manifest: Manifest | None
    problem: str | None
    num_bytes: int
    last_used: float

    @property
    def days_unused(self) -> float:
        """Days since a run last opened the entry."""
        return (time.time() - self.last_used) / 86400


@dataclass(frozen=True)
class Removal:
    """Something that `prune` takes away, and why."""

    path: Path
    reason: str
    num_bytes: int


def entries(folder: Path) -> Iterator[Entry]:
    """All entries, the last used first; reads manifests only."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [_entry(path) for path in paths if _KEY.fullmatch(path.name)]
    yield from sorted(found, key=lambda entry: -entry.last_used)


def damage(path: Path) -> DamagedEntry | None:
    """Read an entry as a whole; what is wrong with it, or None. Changes nothing."""
    try:
        _, store = open_entry(path, None, lambda: None)
        store.guard.check_all()
    except DamagedEntry as found:
        return found
    return None


def removals(folder: Path, older_than_days: float | None, *, everything: bool) -> Iterator[Removal]:
    """What `prune` would take away: leftovers, damaged entries, and those long unused or all.

    Entries are opened but not read as a whole: what `verify` or a run finds in the data is set aside there and then.
    """
    for path in leftovers(folder):
        if is_abandoned(path):
            yield Removal(path, "set aside or left by a killed writer", folder_bytes(path))
    for entry in entries(folder):
        if everything:
            reason = "asked for by --all"
        elif entry.problem is not None:
            reason = entry.problem
        elif older_than_days is not None and entry.days_unused > older_than_days:
            reason = f"unused for {entry.days_unused:.0f} days"
        else:
            continue
        yield Removal(entry.path, reason, entry.num_bytes)


def remove(removal: Removal) -> None:
    """Delete a folder; an entry disappears under its name first, so that no reader sees half of it. Raises OSError."""
    path = removal.path
    if _KEY.fullmatch(path.name):
        path = retire(path)
    if path is not None:
        shutil.rmtree(path)


def folder_bytes(path: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


def _entry(path: Path) -> Entry:
    manifest, problem = None, None
    try:
        # Opening checks the size of every file, and the whole of a small entry.
        manifest, _ = open_entry(path, None, lambda: None)
    except DamagedEntry as found:
        problem = f"damaged: {found}"
    used = path / MANIFEST if (path / MANIFEST).exists() else path
    return Entry(path, manifest, problem, folder_bytes(path), used.stat().st_mtime)
