"""Write files so that a kill or a power cut leaves either the old content or the new, never a mixture.

Links are not followed, since another user may have made them. Replacing or removing a link changes the link itself.
Appending to a link is refused.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spurline.errors import RunFailedError, UserError

_TEMPORARY = re.compile(r"\..+\.\d{1,9}\.tmp", re.DOTALL)
"""Name of a temporary file that a process has not finished."""


def sync_file(path: Path) -> None:
    """Force a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def own_file(path: str, flags: int) -> int:
    """Open a file for writing, as an `opener` for the function `open`. Raises OSError for a link or a pipe."""
    try:
        return regular_file(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed; remove it", path) from None
        raise


def regular_file(path: str, flags: int) -> int:
    """Open a file of a run directory, as an `opener` for the function `open`.

    Raises OSError for a pipe or a device, since reading it might block forever or never end.
    """
    # Without O_NONBLOCK, opening a pipe waits until its other end is opened.
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically and durably, encoded as UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Replace a file atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_file(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files that killed processes have left in a folder."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            # A temporary file that cannot be removed does no harm.
            with suppress(OSError):
                remove(path)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link. Do nothing if the path does not exist. Raises OSError."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter. Its content can be trusted even if its parent folder is shared.

    Raises UserError for a link, another user's folder, or a folder that others may write into.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        # From here on, use the descriptor, since another user may put another folder at the path.
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise UserError(f"{path}: {_not_private(error.strerror or str(error))}") from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise UserError(f"{path}: {_not_private(f'it belongs to the user with number {found.st_uid}')}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UserError(f"{path}: {_not_private('others may write into it')}")
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def _not_private(why: str) -> str:
    return f"must be a private folder of this user ({why}). Remove it, or set TMPDIR to a folder of your own."


@contextmanager
def scratch_inside(folder: Path) -> Iterator[Path]:
    """Make a new folder inside `folder` for the duration of a context. Then remove it and the parents made for it.

    Raises OSError if a folder cannot be made.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="scratch-", dir=folder) as scratch:
            yield Path(scratch)
    finally:
        for place in made:
            # Another process may have put files into the folder meanwhile.
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically and durably."""
    write_text(path, json_text(value))


def json_text(value: Mapping[str, Any]) -> str:
    """Return the text that `write_json` writes."""
    return json.dumps(value, indent=2, sort_keys=False) + "\n"


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and durably. If this raises RunFailedError, the old file is unchanged."""
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Return a context that raises the error of `write_failure` in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise write_failure(path, error) from error


def write_failure(path: Path, error: Exception) -> RunFailedError:
    """Return the error for a file that cannot be written. It says why, how much space is left, and what to do."""
    folder = next((parent for parent in path.parents if parent.is_dir()), Path("/"))
    why = getattr(error, "strerror", None) or error
    free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free on that disk"
    return RunFailedError(
        f"{path}: cannot be written: {why} ({free}). Free some space or make the folder writable, "
        "then resume the run; everything up to the last checkpoint is intact."
    )
