"""RUN_DIR: its file names, and the lock that keeps two runs out of one directory."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from spurline.errors import RunDirectoryError


class RunDirectory:
    """The folder of one run. Opening it takes the lock; closing, or the death of the process, releases it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.json"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.eval_samples = path / "eval_samples.jsonl"
        self.exported_model = path / "model"
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Create the folder and lock it. Raises RunDirectoryError when another process holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "run.lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir {self.path} cannot be written: {error.strerror}. Choose another with --set run_dir=PATH."
            ) from error
        if not _take_lock(lock):
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise RunDirectoryError(
                f"run_dir {self.path} is in use by another run (process {holder}). Wait for it, stop it, or choose "
                "another with --set run_dir=PATH."
            )
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def is_in_use(self) -> bool:
        """Whether a run, in this or another process, holds the lock now."""
        try:
            with (self.path / "run.lock").open("r", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _take_lock(lock: IO[str], patience_s: float = 1.0) -> bool:
    """Try for a moment: `is_in_use` holds the lock for an instant when somebody asks for a report."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True
