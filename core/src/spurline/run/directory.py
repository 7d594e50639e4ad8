"""RUN_DIR: its file names, the lock that keeps two runs out of it, and the files that it keeps for people.

Those are the config, the summary and sample answers; trackers and checkpoints write their own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import IO, Any

from spurline.data.token_store import describe
from spurline.errors import RunDirectoryError, RunDirectoryLostError, UserError
from spurline.files import own_file, remove_unfinished, write_failure, write_json
from spurline.run.record_files import CONFIG_FILE, SUMMARY_FILE, read_mapping
from spurline.trackers.jsonl import METRICS_FILE, cut_back


class RunDirectory:
    """The folder of one run. Opening it takes the lock; closing, or the death of the process, releases it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / METRICS_FILE
        self.config = path / CONFIG_FILE
        self.summary = path / SUMMARY_FILE
        self.report = path / "report.html"
        self.eval_samples = path / "eval_samples.jsonl"
        self.exported_model = path / "model"
        self.exported_adapter = path / "adapter"
        self._lock: IO[str] | None = None
        self._folder: int | None = None

    def open(self) -> None:
        """Create the folder, lock it, and remove what a killed process had begun to write into it or its subfolders.

        Raises RunDirectoryError when another process holds it, UserError when this is one of several that would.
        """
        _refuse_launcher()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Emptied below: where a folder of others has a link here, not what that points to.
            descriptor = os.open(self.path / "run.lock", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            lock = os.fdopen(descriptor, "a+", encoding="utf-8")
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir {self.path} cannot be written: {_reason(error)}. Choose another with --set run_dir=PATH."
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
        # Held open, its number on the disk cannot go to a folder that is made in its place.
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        for folder in (self.path, *(path for path in self.path.iterdir() if path.is_dir())):
            remove_unfinished(folder)

    def obstacle(self) -> str | None:
        """Why a run could not write here, as a clause, as far as looking tells; None where nothing is in the way."""
        nearest = next((path for path in (self.path, *self.path.parents) if os.path.lexists(path)), self.path)
        if not nearest.is_dir():
            return f"{nearest} is no folder"
        return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} is not writable for this user"

    def check_present(self) -> None:
        """Raise RunDirectoryLostError when the folder that was opened is no longer at its path."""
        assert self._folder is not None, f"{self.path} is not open"
        why = "another folder is in its place"
        try:
            if os.path.samestat(os.fstat(self._folder), self.path.stat()):
                return
        except OSError as error:
            why = str(error.strerror)
        raise RunDirectoryLostError(
            f"run_dir {self.path} was removed or moved while the run was going on ({why}): put it back to go on from "
            "its last checkpoint, or train the same config again to begin anew."
        )

    def set_aside_earlier(self, more: Sequence[str]) -> str | None:
        """Move what an attempt without a checkpoint left into a folder `before-N`; returns a note on it, if any.

        more: names of further entries of the folder that belong to its record.
        """
        steps = self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0
        if steps == 0:
            return None
        number = next(number for number in count(1) if not (self.path / f"before-{number}").exists())
        target = self.path / f"before-{number}"
        target.mkdir()
        own = (self.eval_samples, self.config, self.report)
        # An earlier attempt may have had another source, with files of its own.
        earlier = read_mapping(self.summary).get("records", [])
        # The metrics last: they say that there is something to move, also after a kill on the way. Just before them the
        # summary, which names what is to move.
        names = [*(path.name for path in own), *more, *map(os.path.basename, earlier)]
        for name in (*names, self.summary.name, self.metrics.name):
            if (self.path / name).exists():
                (self.path / name).rename(target / name)
        return (
            f"{self.path} has {steps:,} steps of an earlier attempt and no checkpoint, so the run starts again. "
            f"What that attempt left is kept in {target}."
        )

    def is_in_use(self) -> bool:
        """Return whether a run, in this or another process, holds the lock now."""
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
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def _refuse_launcher() -> None:
    """Torchrun and its like start a process for each rank, and end them all once the lock has stopped one."""
    launched = all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if launched and os.environ["WORLD_SIZE"] != "1":
        size = os.environ["WORLD_SIZE"]
        raise UserError(
            f"This is one of {size} processes that torchrun, accelerate launch or the like started (RANK is "
            f"{os.environ['RANK']}), and each would train this run. Start it once, without a launcher: Spurline starts "
            f"its ranks itself, with plugins: [fsdp_backend] and backend: {{name: fsdp, ranks: {size}}}."
        )


def _reason(error: OSError) -> str:
    return "its run.lock is a link, which is not followed" if error.errno == errno.ELOOP else str(error.strerror)


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


class RunRecordFiles:
    """Writes config.json, summary.json and eval_samples.jsonl of a run directory.

    summary: JSON-able facts; `status` and `error` are added here.
    """

    def __init__(self, directory: RunDirectory, summary: Mapping[str, Any]) -> None:
        self._directory = directory
        self.summary: dict[str, Any] = dict(summary)

    def start(self, config: Mapping[str, Any], resume_step: int) -> None:
        """Write the resolved config, mark the run as running, and drop samples of steps that are trained again."""
        try:
            write_json(self._directory.config, config)
            self._write_status("running")
        except OSError as error:
            raise write_failure(self._directory.path, error) from error
        if self._directory.eval_samples.exists():
            cut_back(self._directory.eval_samples, resume_step)

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the generated answers of one evaluation. Raises RunFailedError when the disk refuses."""
        if samples:
            text = "".join(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples)
            # Half a surrogate pair, which no file can hold, becomes what JSON writes for it.
            try:
                place = self._directory.eval_samples
                with open(place, "a", encoding="utf-8", errors="backslashreplace", opener=own_file) as file:
                    file.write(text)
            except OSError as error:
                raise write_failure(self._directory.eval_samples, error) from error

    def data_notes(self) -> list[str]:
        """Return lines on the data: its size, and what was left out and why."""
        return [line for name, facts in self.summary["data"].items() for line in describe(name, facts)]

    def finish(self, status: str, error: str | None = None, given_up: Sequence[str] = ()) -> None:
        """Mark the run as finished, stopped, interrupted or failed. given_up: a line for each prompt left out."""
        if given_up:
            self.summary["given_up"] = list(given_up)
        self._write_status(status, error)

    def _write_status(self, status: str, error: str | None = None) -> None:
        self.summary |= {"status": status} | ({"error": error} if error is not None else {})
        write_json(self._directory.summary, self.summary)
