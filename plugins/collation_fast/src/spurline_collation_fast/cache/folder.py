"""Find an entry of the token cache by its key, commit a new entry, and list and remove entries.

Data flow: tokenization -> TokenCache -> Tokenized with a mapped store. Readers need no locks. A writer fills its
own folder and renames it into place, and an entry is renamed before it is removed. So readers see either a whole entry
or none, on shared folders too. A process that has mapped a removed entry can still read it. Names of folders that are
not entries begin with a dot.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from spurline.data.token_store import Tokenized
from spurline.errors import DataError
from spurline.files import remove as remove_path
from spurline.files import sync_file
from spurline_collation_fast.cache.entry import MANIFEST, CacheKey, DamagedEntry, EntryWriter, disk_errors, open_entry

_WRITING = ".writing-"
"""Prefix of the folders that writers fill. A writer locks its folder until the writer's process ends."""
_REMOVED = ".removed-"
_KEY = re.compile(r"[0-9a-f]{32}")
_ATTEMPTS = 5
"""Attempts to commit an entry while other processes commit or remove the same entry."""


class TokenCache:
    """Entries in one folder, each in a subfolder named by its key. `notes` are lines to show to the user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        self.notes: list[str] = []

    def open(self, key: CacheKey) -> Tokenized | None:
        """Return the tokens of this key, or None if there are none. A damaged entry is removed, with a note.

        `Tokenized.examples` has the names that files had when the tokens were made. Raises OSError if the entry cannot
        be read or removed now. The entry may be undamaged then.
        """
        entry = self.folder / key.digest
        try:
            entry.stat()
            found = open_entry(entry, key.labels)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedEntry as damage:
            remove(entry)
            self.notes.append(f"token cache: {damage}. The entry is removed, and the tokens are made again.")
            return None
        # The manifest's time says when the entry was last used, for `list` and `prune --older-than`. A reader without
        # write access cannot set it.
        with suppress(OSError):
            os.utime(entry / MANIFEST)
        return replace(found, notes=tuple(self.notes))

    def discard(self, key: CacheKey) -> None:
        """Remove the entry of this key, if it exists. Raises OSError if it cannot be removed."""
        remove(self.folder / key.digest)

    def check_writable(self) -> None:
        """Raise OSError if no entry can be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.folder).close()

    @contextmanager
    def writer(self, key: CacheKey) -> Iterator[EntryWriter]:
        """Yield a sink for the samples of a new entry. If the entry is not committed, its files are removed.

        Raises DataError if the disk is full or fails.
        """
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)
            path, lock = _locked_folder(self.folder)
        try:
            with disk_errors(self.folder):
                # A temporary folder is private, but everyone who may read the cache must be able to read the new entry.
                path.chmod(self.folder.stat().st_mode & 0o777)
            writer = EntryWriter(path, key)
            try:
                yield writer
            finally:
                writer.close()
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    def commit(self, finished: Path, key: CacheKey) -> Tokenized:
        """Rename a finished folder into place and open it. If another writer was faster, open its entry.

        Raises DataError if the entry cannot be put in place or read back.
        """
        entry = self.folder / key.digest
        with disk_errors(self.folder):
            for _ in range(_ATTEMPTS):
                try:
                    finished.rename(entry)
                    sync_file(self.folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                if (found := self.open(key)) is not None:
                    return found
        raise DataError(
            f"{entry}: the token cache entry cannot be put in place. {' '.join(self.notes)} Check the disk, set "
            "tokenization.cache_dir to another folder, or tokenization.disable_cache: true."
        )


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """Make and lock the folder of a writer. Return the folder and the file descriptor that holds the lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_WRITING, dir=parent))
        # Another process may remove the folder by `sweep` before it is locked.
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            # On a file system without locks this has no effect. `sweep` then cannot lock the folder and keeps it.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                return path, lock
            os.close(lock)


def sweep(folder: Path) -> None:
    """Remove the folders of killed writers, which have no lock, and entries whose removal was interrupted."""
    for path in folder.glob(f"{_WRITING}*"):
        # Skip folders that are in use or belong to other users.
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
    for path in folder.glob(f"{_REMOVED}*"):
        with suppress(OSError):
            remove_path(path)


def entry_paths(folder: Path) -> list[Path]:
    """Return the folders of all entries. Raises DataError if they cannot be listed."""
    try:
        return sorted(path for path in folder.iterdir() if _KEY.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(
            f"{folder}: the token cache cannot be listed: {error.strerror or error}. Choose another folder by "
            "`--cache-dir`."
        ) from error


def remove(entry: Path) -> None:
    """Rename an entry and then remove it, if it exists. Raises OSError if it cannot be renamed."""
    aside = entry.with_name(f"{_REMOVED}{entry.name}-{secrets.token_hex(4)}")
    try:
        entry.rename(aside)
    except FileNotFoundError:
        return
    # Readers cannot find the renamed entry. Over NFS, files that a process has mapped stay until a later sweep.
    with suppress(OSError):
        remove_path(aside)
