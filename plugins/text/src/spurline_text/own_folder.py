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
    """A new folder in `parent`, or in the system's folder for temporary files.

    Its name begins with `prefix`, which nothing else uses: folders there with this prefix whose owners are dead are
    removed.
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
        """Remove the folder; the next sweep takes what another process is writing there now."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(place: Path, prefix: str) -> None:
    """Remove the folders with this prefix whose owners are dead."""
    for folder in place.glob(f"{prefix}*"):
        # Folders of other users cannot be opened and stay. A link to a folder is not ours either.
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
