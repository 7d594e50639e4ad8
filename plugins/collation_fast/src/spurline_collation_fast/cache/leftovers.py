"""Folders in the cache that are no entries: being written, left by a killed writer, or set aside.

Both kinds start with a dot, so that nothing takes them for entries. An entry that is replaced or removed is renamed
first, never emptied in place: processes that have it mapped keep reading it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

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


def leftovers(folder: Path) -> Iterator[Path]:
    """All folders that are no entries."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith((_WRITING, _RETIRED)) and path.is_dir():
            yield path


def sweep(folder: Path) -> None:
    """Remove what nobody can need: folders of dead writers of this host, and what was set aside long ago."""
    for path in leftovers(folder):
        if _days_aside(path) > DAYS_ASIDE or _writer_is_dead(path):
            # What cannot be removed is another user's; `prune` reports it.
            shutil.rmtree(path, ignore_errors=True)


def is_abandoned(path: Path) -> bool:
    """Whether `prune` may remove a leftover: anything but a folder that is being written."""
    return path.name.startswith(_RETIRED) or _writer_is_dead(path) or _days_untouched(path) > DAYS_UNTOUCHED


def _days_aside(path: Path) -> float:
    named = _ASIDE.fullmatch(path.name)
    return (time.time() - int(named["since"])) / _DAY_S if named is not None else 0.0


def _writer_is_dead(path: Path) -> bool:
    """Whether the writer was a process of this host and is no more; False when that cannot be known from here."""
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
    """This host, and the space in which its process ids mean something: containers may share a host name."""
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = "0"
    return re.sub(r"[^\w.-]", "_", f"{socket.gethostname()}-{namespace}")
