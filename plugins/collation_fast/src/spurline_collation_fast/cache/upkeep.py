"""Look after the cache folder: what is in it, whether it is whole, and what can go.

In: the folder. Out: facts for the `spurline cache` command, which prints them. Needs no tokenizer and no config.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spurline_collation_fast.cache.layout import MANIFEST, DamagedEntry, Manifest
from spurline_collation_fast.cache.leftovers import is_abandoned, leftovers, paths_in, retire
from spurline_collation_fast.cache.mapped_store import open_entry

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Entry:
    """One entry. manifest: None when it cannot be read, and then `problem` says why. is_damaged: whether that is known,
    and not only that nobody can look now. last_used: seconds since 1970."""

    path: Path
    manifest: Manifest | None
    problem: str | None
    is_damaged: bool
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
    """All entries, the last used first; reads manifests and checksums, no data. Raises DataError."""
    found = [_entry(path) for path in paths_in(folder) if _KEY.fullmatch(path.name)]
    # One that another process removed meanwhile is none.
    known = [entry for entry in found if os.path.lexists(entry.path)]
    yield from sorted(known, key=lambda entry: -entry.last_used)


def damage(path: Path) -> DamagedEntry | None:
    """Read an entry as a whole; what is wrong with it, or None. Changes nothing. Raises OSError."""
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
        elif entry.is_damaged:
            reason = entry.problem or ""
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
    """Bytes of the files in a folder, as far as they can be seen and are still there."""
    total = 0
    with contextlib.suppress(OSError):
        for file in path.rglob("*") if path.is_dir() else (path,):
            with contextlib.suppress(OSError):
                total += file.stat().st_size if file.is_file() else 0
    return total


def _entry(path: Path) -> Entry:
    manifest, problem, is_damaged = None, None, False
    try:
        # Opening checks the size of every file.
        manifest, _ = open_entry(path, None, lambda: None, eager=False)
    except DamagedEntry as found:
        problem, is_damaged = f"damaged: {found}", True
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    return Entry(path, manifest, problem, is_damaged, folder_bytes(path), _last_used(path))


def _last_used(path: Path) -> float:
    for place in (path / MANIFEST, path):
        with contextlib.suppress(OSError):
            return place.stat().st_mtime
    return time.time()
