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
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from spurline.errors import DataError

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
            shutil.rmtree(path, ignore_errors=True)


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
