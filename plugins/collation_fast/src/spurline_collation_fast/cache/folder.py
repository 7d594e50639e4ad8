"""The folder of the token cache: find an entry by its key, commit a new one, list and remove entries.

Place on the way: tokenization -> TokenCache -> Tokenized with a mapped store. Readers need no locks: a writer fills a
folder of its own and renames it into place, and an entry is renamed before it is removed. So readers see a whole entry
or none, on shared folders too, and a process that has an entry mapped keeps reading it. Folders that are no entries
begin with a dot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from spurline.data.token_store import Tokenized
from spurline.errors import DataError
from spurline.files import remove as remove_path
from spurline.files import sync_file
from spurline_collation_fast.cache.entry import MANIFEST, CacheKey, DamagedEntry, EntryWriter, disk_errors, open_entry
from spurline_text import own_folder

ENVIRONMENT_VARIABLE = "SPURLINE_CACHE"

WRITING = ".writing-"
"""The prefix of a folder that a writer has locked and fills."""
_REMOVED = ".removed-"
_KEY = re.compile(r"[0-9a-f]{32}")
_ATTEMPTS = 5
"""Times to look again when other processes commit or remove the same entry."""


def default_cache_folder() -> Path:
    """Return SPURLINE_CACHE, else ~/.cache/spurline/tokens. Raises DataError if there is no home directory."""
    folder = Path(os.environ.get(ENVIRONMENT_VARIABLE) or "~/.cache/spurline/tokens")
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise DataError(
            f"token cache: {folder} cannot be written, since no home directory was found. Set {ENVIRONMENT_VARIABLE} "
            "or tokenization.cache_dir to a folder."
        ) from error


class TokenCache:
    """Entries in one folder, each in a subfolder named by its key.

    `notes` holds lines for the user about what was found wrong so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        self.notes: list[str] = []
        self._problem: str | None = None

    def open(self, key: CacheKey) -> Tokenized | None:
        """Return the tokens of this key, or None when they must be made.

        A damaged entry is removed with a note. An entry that cannot be read or removed is left alone, and
        `write_problem` says so. `Tokenized.examples` name files as they were called when the tokens were made.
        """
        entry = self.folder / key.digest
        with self._leaving_alone(entry):
            if not _exists(entry):
                return None
            try:
                found = open_entry(entry, key.labels)
            except DamagedEntry as damage:
                remove(entry)
                self.notes.append(f"token cache: {damage}. The entry is removed, and the tokens are made again.")
                return None
            # For `list` and `prune --older-than`; a reader without write access leaves no trace.
            with contextlib.suppress(OSError):
                os.utime(entry / MANIFEST)
            return replace(found, notes=tuple(self.notes))
        return None

    def discard(self, key: CacheKey) -> None:
        """Remove the entry of this key; `write_problem` says so if that is not possible."""
        with self._leaving_alone(self.folder / key.digest):
            remove(self.folder / key.digest)

    def write_problem(self) -> str | None:
        """Return a line for the user that says why no entry can be written, or None."""
        if self._problem is not None:
            return self._problem
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                return None
        except OSError as error:
            return (
                f"token cache: {self.folder} cannot be written ({error.strerror or error}), so the tokens stay in "
                "memory and are made again by the next run. Set tokenization.cache_dir to keep them."
            )

    @contextlib.contextmanager
    def writer(self, key: CacheKey) -> Iterator[EntryWriter]:
        """Yield a sink for the samples of a new entry; nothing of it stays unless it is finished and committed.

        Raises DataError if the disk is full or fails.
        """
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)
            own = own_folder.OwnFolder(WRITING, self.folder)
        try:
            with disk_errors(self.folder):
                # Only its owner may read a temporary folder; all who may read the cache may read an entry.
                own.path.chmod(self.folder.stat().st_mode & 0o777)
            writer = EntryWriter(own.path, key)
            try:
                yield writer
            finally:
                writer.close()
        finally:
            own.remove()

    def commit(self, finished: Path, key: CacheKey) -> Tokenized:
        """Rename a finished folder into place and open it; open the entry of another writer that was faster.

        Raises DataError if the entry cannot be put in place or read back.
        """
        entry = self.folder / key.digest
        with disk_errors(self.folder):
            for _ in range(_ATTEMPTS):
                try:
                    finished.rename(entry)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                else:
                    sync_file(self.folder)
                found = self.open(key)
                if found is not None:
                    return found
        raise DataError(
            f"{entry}: the token cache entry cannot be put in place or read back. "
            f"{' '.join([*self.notes, self._problem or ''])} "
            "Check the disk, set tokenization.cache_dir to another folder, or tokenization.disable_cache: true."
        )

    @contextlib.contextmanager
    def _leaving_alone(self, entry: Path) -> Iterator[None]:
        """Note an OSError as the reason to keep the tokens in memory."""
        try:
            yield
        except OSError as error:
            self._problem = (
                f"token cache: {entry} cannot be read or replaced ({error.strerror or error}), so it is left alone and "
                "the tokens stay in memory for this run. Check its permissions and the storage, or set "
                "tokenization.cache_dir to another folder."
            )


def entry_paths(folder: Path) -> list[Path]:
    """Return the folders of all entries. Raises DataError if they cannot be listed."""
    try:
        return sorted(path for path in folder.iterdir() if _KEY.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(
            f"{folder}: the token cache cannot be listed: {error.strerror or error}. Make the folder readable, or "
            "choose another one: `--cache-dir`, in a run tokenization.cache_dir."
        ) from error


def remove(entry: Path) -> None:
    """Remove an entry, which disappears under its name at once; do nothing when another process was faster.

    Raises OSError when it cannot be renamed.
    """
    aside = entry.with_name(f"{_REMOVED}{entry.name}-{secrets.token_hex(4)}")
    try:
        entry.rename(aside)
    except FileNotFoundError:
        return
    # Readers no longer find it. Files that are mapped over NFS keep the folder there until a later sweep.
    with contextlib.suppress(OSError):
        remove_path(aside)


def sweep(folder: Path) -> None:
    """Remove what killed writers have left: folders without a lock, and entries that were being removed."""
    own_folder.sweep(folder, WRITING)
    for path in folder.glob(f"{_REMOVED}*"):
        # Another process may be at it, and another user's stays.
        with contextlib.suppress(OSError):
            remove_path(path)


def _exists(entry: Path) -> bool:
    """Return whether there is an entry. Raises OSError if that cannot be told."""
    try:
        entry.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
