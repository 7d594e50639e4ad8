"""The folder of the token cache: find an entry by its key, write a new one, remove a damaged one.

Place on the way: tokenization -> TokenCache -> Tokenized with a mapped store. Readers need no locks: writers fill a
folder of their own and rename it into place, so that readers see a whole entry or none, on shared folders too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from spurline.data.token_store import Tokenized
from spurline.errors import DataError
from spurline.files import sync_file
from spurline_collation_fast.cache.entry import MANIFEST, CacheKey, DamagedEntry, open_entry
from spurline_collation_fast.cache.upkeep import WRITING, may_remove, remove, sweep
from spurline_collation_fast.cache.writer import CacheWriter, disk_errors
from spurline_text.own_folder import OwnFolder

ENVIRONMENT_VARIABLE = "SPURLINE_CACHE"

_ATTEMPTS = 5
"""Times to look again when other processes replace the entry under our hands."""


class NoHomeError(DataError):
    """The cache would be in a home directory, and this user has none."""


def default_cache_folder() -> Path:
    """Return SPURLINE_CACHE, else ~/.cache/spurline/tokens. Raises NoHomeError."""
    return _expanded(Path(os.environ.get(ENVIRONMENT_VARIABLE) or "~/.cache/spurline/tokens"))


class TokenCache:
    """Entries in one folder, each in a subfolder named by its key. Making one may raise NoHomeError.

    notes: lines for the user about what was found wrong so far; `commit` and `open` put them into `Tokenized.notes`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _expanded(folder)
        self.notes: list[str] = []
        self._stuck: str | None = None

    def open(self, key: CacheKey) -> Tokenized | None:
        """Return the tokens of this key, or None when they must be made.

        A damaged entry is removed with a note; one that stays in the way, or cannot be read now, is left alone, and
        `write_problem` says so. `Tokenized.examples` name files as they were called when the tokens were made.
        """
        entry = self.folder / key.digest
        try:
            identity = _identity(entry)
            if identity is None:
                return None
            try:
                found = open_entry(entry, key.labels)
            except DamagedEntry as damage:
                # Unless another process has replaced it meanwhile.
                if _identity(entry) == identity:
                    remove(entry)
                self.notes.append(f"token cache: {damage}. The entry is removed, and the tokens are made again.")
                return None
        except OSError as error:
            self._stuck = (
                f"token cache: {entry} cannot be read or replaced ({error.strerror or error}), so it is left alone and "
                "the tokens stay in memory for this run. Check its permissions and the storage, or set "
                "tokenization.cache_dir to another folder."
            )
            return None
        # For `list` and `prune --older-than`; a reader without write access leaves no trace.
        with contextlib.suppress(OSError):
            os.utime(entry / MANIFEST)
        return replace(found, notes=tuple(self.notes))

    def write_problem(self, replaced: CacheKey | None = None) -> str | None:
        """Return None when an entry can be written, otherwise a line for the user that says why not.

        replaced: The key of an entry that has to give way if there is one.
        """
        if self._stuck is not None:
            return self._stuck
        try:
            if replaced is not None and not may_remove(self.folder / replaced.digest):
                return (
                    f"token cache: {self.folder / replaced.digest} is another user's and cannot be replaced, so the "
                    "tokens stay in memory for this run. Set tokenization.cache_dir to another folder."
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                return None
        except OSError as error:
            return (
                f"token cache: {self.folder} cannot be written ({error.strerror or error}), so the tokens stay in "
                "memory and are made again by the next run. Set tokenization.cache_dir to keep them."
            )

    @contextlib.contextmanager
    def writer(self, key: CacheKey, *, replace: bool = False) -> Iterator[CacheWriter]:
        """Yield a sink for the samples of a new entry; `commit` puts it into the cache. Without commit nothing stays.

        Args:
            key: What the samples are made of.
            replace: Let an entry that is there now give way to the new one. One that another process commits meanwhile
                is as new as ours and stays.

        Raises:
            DataError: If the disk is full or fails.
        """
        entry = self.folder / key.digest
        with disk_errors(self.folder):
            replaced = _identity(entry) if replace else None
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)
            own = OwnFolder(WRITING, self.folder)
        try:
            with disk_errors(self.folder):
                # A temporary folder is for its owner alone, an entry for all who may read the cache.
                own.path.chmod(self.folder.stat().st_mode & 0o777)
            writer = CacheWriter(own.path, key, lambda: self._publish(own.path, key, replaced))
            try:
                yield writer
            finally:
                writer.close()
        finally:
            own.remove()

    def _publish(self, temporary: Path, key: CacheKey, replaced: tuple[int, int] | None) -> Tokenized:
        """Rename a finished folder into place and open it; when another writer was faster, open that one's entry."""
        entry = self.folder / key.digest
        for _ in range(_ATTEMPTS):
            try:
                temporary.rename(entry)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                if replaced is not None and _identity(entry) == replaced:
                    remove(entry)
                    continue
            else:
                sync_file(self.folder)
            found = self.open(key)
            if found is not None:
                return found
            if not temporary.exists() or self._stuck is not None:
                break
        raise DataError(
            f"{entry}: the token cache entry cannot be put in place or read back. "
            f"{' '.join([*self.notes, self._stuck or ''])} "
            "Check the disk, set tokenization.cache_dir to another folder, or tokenization.disable_cache: true."
        )


def _expanded(folder: Path) -> Path:
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise NoHomeError(
            f"token cache: {folder} cannot be written, since no home directory was found. Set {ENVIRONMENT_VARIABLE} "
            "or tokenization.cache_dir to a folder."
        ) from error


def _identity(entry: Path) -> tuple[int, int] | None:
    """Tell one folder from another of the same name; None when there is none."""
    try:
        found = entry.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
