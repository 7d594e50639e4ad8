"""The folder of the token cache: find an entry by its key, write a new one, set a damaged one aside.

Place on the way: tokenization -> TokenCache -> Tokenized with a mapped store. Works without locks: writers fill a
folder of their own and rename it into place, so readers see a whole entry or none, on shared folders too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spurline.data.token_store import Tokenized
from spurline.errors import DataError
from spurline.files import sync_file
from spurline_collation_fast.cache.layout import MANIFEST, MISSING, CacheKey, DamagedEntry
from spurline_collation_fast.cache.mapped_store import open_entry
from spurline_collation_fast.cache.upkeep import may_retire, retire, sweep, temporary_folder
from spurline_collation_fast.cache.writer import CacheWriter, disk_errors

ENVIRONMENT_VARIABLE = "SPURLINE_CACHE"

_ATTEMPTS = 5
"""Times to look again when other processes replace the entry under our hands."""


class NoHomeError(DataError):
    """The cache would be in a home directory, and this user has none."""


def default_cache_folder() -> Path:
    """SPURLINE_CACHE, else ~/.cache/spurline/tokens. Raises NoHomeError."""
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
        """The tokens of this key, or None when they must be made.

        A damaged entry is set aside with a note; one that stays in the way, or cannot be read now, is left alone, and
        `write_problem` says so. The store checks its blocks when they are first touched. Datasets have the labels of
        the key; `Tokenized.examples` name files as they were called when the tokens were made.
        """
        entry = self.folder / key.digest
        try:
            return self._open_or_set_aside(entry, key)
        except OSError as error:
            # Nothing is known about the entry, which may be whole; other runs may be reading it.
            self._stuck = (
                f"token cache: {entry} cannot be read ({error.strerror or error}), so it is left alone and the tokens "
                "stay in memory for this run. Check its permissions, `ulimit -n` and the storage, or set "
                "tokenization.cache_dir to another folder."
            )
            return None

    def write_problem(self, key: CacheKey, *, replace: bool = False) -> str | None:
        """None when this entry can be written, otherwise a line for the user that says why not.

        replace: as for `writer`.
        """
        if self._stuck is not None:
            return self._stuck
        entry = self.folder / key.digest
        try:
            if replace and not may_retire(entry):
                return (
                    f"token cache: {entry} is another user's and cannot be replaced, so the tokens stay in memory for "
                    "this run. Set tokenization.cache_dir to another folder."
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
        """A sink for the samples of a new entry; `commit` puts it into the cache. Without commit nothing stays.

        replace: a valid entry that is there now gives way to the new one; one that another process commits meanwhile
        is as new as ours and stays. Raises DataError when the disk is full or fails.
        """
        entry = self.folder / key.digest
        with disk_errors(self.folder):
            replaced = _identity(entry) if replace else None
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)
            temporary = temporary_folder(self.folder, key.digest)
        try:
            writer = CacheWriter(temporary, key, lambda: self._publish(temporary, key, replaced))
            try:
                yield writer
            finally:
                writer.close()
        finally:
            # What cannot be removed now is swept by a later writer, or by `prune`.
            shutil.rmtree(temporary, ignore_errors=True)

    def _open_or_set_aside(self, entry: Path, key: CacheKey) -> Tokenized | None:
        for _ in range(_ATTEMPTS):
            identity = _identity(entry)
            if identity is None:
                return None
            try:
                return self._open_entry(entry, key)
            except DamagedEntry as damage:
                if _identity(entry) != identity:
                    continue  # Another process replaced it meanwhile.
                stuck = _set_aside(entry, identity)
                if stuck is None:
                    self.notes.append(f"token cache: {damage}. The entry was set aside, and the tokens are made again.")
                else:
                    self._stuck = f"token cache: {damage}. {stuck} The tokens stay in memory for this run."
                return None
        return None

    def _open_entry(self, entry: Path, key: CacheKey) -> Tokenized:
        identity = _identity(entry)
        manifest, store = open_entry(entry, key.labels, lambda: _set_aside(entry, identity))
        # For `list` and `prune --older-than`; a reader without write access leaves no trace.
        with contextlib.suppress(OSError):
            os.utime(entry / MANIFEST)
        try:
            sources = dict(zip(key.labels, manifest.sizes, strict=True))
            return Tokenized(
                store, summary={**manifest.summary, "sources": sources}, notes=tuple(self.notes), **manifest.findings
            )
        except (TypeError, ValueError) as error:
            raise DamagedEntry(entry / MANIFEST, f"does not describe an entry of this key ({error})") from error

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
                    retire(entry)
                    continue
                found = self.open(key)
            else:
                sync_file(self.folder)
                found = self.open(key)
                if found is None:
                    break
            if found is not None:
                return found
            if self._stuck is not None:
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
    """Which folder this is, whatever its name; None when there is none. Raises OSError when that cannot be known."""
    try:
        found = entry.stat()
    except MISSING:
        return None
    return found.st_dev, found.st_ino


def _set_aside(entry: Path, identity: tuple[int, int] | None) -> str | None:
    """Retire a damaged entry unless it has been replaced already; None, or why it stays and what to do."""
    try:
        if _identity(entry) == identity:
            retire(entry)
    except OSError as error:
        return (
            f"It cannot be set aside ({error.strerror or error}). Delete {entry}, or set tokenization.cache_dir or "
            "tokenization.disable_cache."
        )
    return None
