"""Look after the cache folder: what is in it, whether it is whole, and what can go.

Needs no tokenizer and no config. Folders that are no entries (being written, left by a killed writer, or set aside)
start with a dot, so that nothing takes them for entries. An entry that is replaced or removed is renamed first, never
emptied in place: processes that have it mapped keep reading it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spurline.errors import DataError
from spurline.files import remove as remove_path
from spurline_collation_fast.cache.layout import MANIFEST, DamagedEntry, Manifest
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
        return (time.time() - self.last_used) / _DAY_S


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
        remove_path(path)


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


_WRITING, _RETIRED = ".writing-", ".retired-"
_ASIDE = re.compile(re.escape(_RETIRED) + r"\w+-(?P<since>\d+)-\w+")
_WRITER = re.compile(re.escape(_WRITING) + r"\w+-(?P<pid>\d+)-\w+-(?P<host>.+)")

_DAY_S = 86400

DAYS_ASIDE = 7
"""Entries set aside are kept this long, since on a shared folder another host may have them mapped: NFS takes the
pages away when a file is deleted, and the process dies by SIGBUS."""

DAYS_UNTOUCHED = 1
"""A folder that another host's writer has not touched for so long is taken for abandoned by `prune`."""


def temporary_folder(folder: Path, digest: str) -> Path:
    """Create a folder for a writer of this process, unlike any other."""
    path = folder / f"{_WRITING}{digest}-{os.getpid()}-{secrets.token_hex(4)}-{_host()}"
    path.mkdir()
    return path


def retire(entry: Path) -> Path | None:
    """Move an entry out of the way; its new place, or None when another process was faster."""
    aside = entry.with_name(f"{_RETIRED}{entry.name}-{time.time():.0f}-{secrets.token_hex(4)}")
    try:
        entry.rename(aside)
    except FileNotFoundError:
        return None
    return aside


def may_retire(entry: Path) -> bool:
    """Whether this process may rename what is there. In a folder like /tmp only its owner may. Raises OSError."""
    try:
        folder, found = entry.parent.stat(), entry.stat()
    except FileNotFoundError:
        return True
    return not folder.st_mode & stat.S_ISVTX or os.geteuid() in (0, folder.st_uid, found.st_uid)


def paths_in(folder: Path) -> list[Path]:
    """All paths in the cache folder, by name; none where there is no folder. Raises DataError."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(
            f"{folder}: the token cache cannot be listed: {error.strerror or error}. Make the folder readable, or "
            "choose another one: `--cache-dir`, in a run tokenization.cache_dir."
        ) from error


def leftovers(folder: Path) -> Iterator[Path]:
    """All folders that are no entries."""
    for path in paths_in(folder):
        if path.name.startswith((_WRITING, _RETIRED)) and path.is_dir():
            yield path


def sweep(folder: Path) -> None:
    """Remove what nobody can need: folders of dead writers of this host, and what was set aside long ago."""
    for path in leftovers(folder):
        if _days_aside(path) > DAYS_ASIDE or _writer_is_dead(path):
            # What cannot be removed is another user's; `prune` reports it.
            with contextlib.suppress(OSError):
                remove_path(path)


def is_abandoned(path: Path) -> bool:
    """Whether `prune` may remove a leftover: anything but a folder that is being written."""
    return path.name.startswith(_RETIRED) or _writer_is_dead(path) or _days_untouched(path) > DAYS_UNTOUCHED


def _days_aside(path: Path) -> float:
    named = _ASIDE.fullmatch(path.name)
    return (time.time() - int(named["since"])) / _DAY_S if named is not None else 0.0


def _writer_is_dead(path: Path) -> bool:
    """Whether the writer was a process of this host and is no more; False when that cannot be known from here, as
    after a reboot. `prune` removes what is left then."""
    named = _WRITER.fullmatch(path.name)
    if named is None or named["host"] != _host():
        return False
    try:
        os.kill(int(named["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # Alive, and another user's.
    return False


def _days_untouched(path: Path) -> float:
    """Days since anything was written into a folder."""
    try:
        return (time.time() - max(file.stat().st_mtime for file in (path, *path.iterdir()))) / _DAY_S
    except OSError:
        return 0.0  # Put into place or removed in this very moment, or not ours to look into.


def _host() -> str:
    """Where a process id of ours means something: this host, since it was booted, and the space of process ids.

    Names are not enough: hosts of a cluster and containers of one image often share one.
    """
    return re.sub(r"[^\w.-]", "_", f"{socket.gethostname()}-{_boot()}-{_process_space()}")


def _boot() -> str:
    """Of this boot of this machine alone; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _process_space() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"
