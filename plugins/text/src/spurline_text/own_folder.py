"""Make a folder for the files of one process; a later process removes it if its owner was killed before it could.

A lock on the folder shows that its owner lives. It ends with the owner, unlike a process id, which may be used again
or belong to another container.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


class OwnFolder:
    """A new folder in this one, or in that for temporary files; those of dead owners there are removed.

    prefix: of its name, and of what is removed; nobody else's folders begin so.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        place = Path(tempfile.gettempdir()) if parent is None else parent
        sweep(place, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            # A process that sweeps right now may have taken the folder for abandoned before it was locked.
            with suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                # On a file system without locks, the folder stays unlocked.
                with suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_SH)
                if self.path.exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Remove it with all in it, but what another process writes there just now: the next sweep takes that."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(place: Path, prefix: str) -> None:
    """Remove the folders with this prefix whose owners are dead."""
    for folder in place.glob(f"{prefix}*"):
        # Another user's cannot be opened, which is how it stays; what is no folder, such as a link to one, is not ours.
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
