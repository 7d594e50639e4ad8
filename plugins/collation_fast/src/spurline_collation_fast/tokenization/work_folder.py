"""A temporary folder that does not outlive its owner for long, however that ends.

Its owner removes it; the workers do when the owner is killed. Where all of them are killed together, the next one who
makes such a folder in the same place does: a lock, which ends with its holder, says that nobody has it any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "spurline-tokenize-"


class WorkFolder:
    """Makes the folder `path`, for this user alone, and removes those of dead owners. Raises OSError.

    parent: where; None is the folder for temporary files.
    """

    def __init__(self, parent: Path | None) -> None:
        place = Path(tempfile.gettempdir()) if parent is None else parent
        for path in place.glob(f"{PREFIX}*"):
            _remove_if_abandoned(path)
        while (made := _make(place)) is None:
            # In the instant before it was locked, another process has taken it for abandoned.
            pass
        self.path, self._lock = made

    def remove(self) -> None:
        """With all that is in it."""
        try:
            shutil.rmtree(self.path)
        finally:
            os.close(self._lock)


def _make(place: Path) -> tuple[Path, int] | None:
    """A new folder, and the open file that holds its lock; None when another process has it."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    if _take(folder) is not False and path.exists():
        return path, folder
    os.close(folder)
    return None


def _remove_if_abandoned(path: Path) -> None:
    try:
        # A link, or what is no folder, is none of ours.
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if os.fstat(folder).st_uid == os.geteuid() and _take(folder):
            # What cannot be removed does this run no harm.
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)


def _take(folder: int) -> bool | None:
    """Whether the lock of this open folder is ours now; None where the storage knows no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
