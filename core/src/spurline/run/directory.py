"""Name, lock, read and write the files of a run directory: config, summary and sample answers.

Trackers and checkpoints write their own files.
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
from spurline.errors import RunDirectoryError, RunDirectoryLostError, UserError, listing
from spurline.files import own_file, regular_file, remove_unfinished, write_errors, write_json
from spurline.trackers.jsonl import METRICS_FILE, cut_back

CONFIG_FILE = "config.json"
"""The resolved config, inside the run directory."""
SUMMARY_FILE = "summary.json"
"""Data counts, versions and status, inside the run directory."""


class RunDirectory:
    """The folder of one run. `open` locks it. `close`, or the end of the process, releases the lock."""

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
        self._lock_file = path / "run.lock"
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Create the folder, lock it, and remove unfinished files of a killed process.

        Raises RunDirectoryError if another process holds the lock, and UserError if a launcher started this process.
        """
        _refuse_launcher()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self._lock_file, "a+", encoding="utf-8", opener=own_file)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            why = "its run.lock is a link, which is not followed" if error.errno == errno.ELOOP else error.strerror
            raise RunDirectoryError(
                f"run_dir {self.path} cannot be written: {why}. Choose another with --set run_dir=PATH."
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
        for folder in (self.path, *(path for path in self.path.iterdir() if path.is_dir())):
            remove_unfinished(folder)

    def check_present(self) -> None:
        """Raise RunDirectoryLostError unless the folder that was opened is still at its path."""
        assert self._lock is not None, f"{self.path} is not open"
        try:
            is_present = os.path.samestat(os.fstat(self._lock.fileno()), self._lock_file.stat())
        except OSError:
            is_present = False
        if not is_present:
            raise RunDirectoryLostError(
                f"run_dir {self.path} was removed or moved during the run. Put it back, or train the config again."
            )

    def set_aside_earlier(self, more: Sequence[str]) -> str | None:
        """Move the files of an earlier attempt that saved no checkpoint to a folder `before-N`, and return a note.

        `more` lists further files and folders to move. Returns None if there was no earlier attempt.
        """
        steps = self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0
        if steps == 0:
            return None
        number = next(number for number in count(1) if not (self.path / f"before-{number}").exists())
        target = self.path / f"before-{number}"
        target.mkdir()
        own = (self.eval_samples, self.config, self.report)
        # If the earlier attempt had another source, its summary lists the files of that source.
        earlier = read_mapping(self.summary).get("records", [])
        # Move summary and metrics last. If this process is killed, the next start needs them to move the other files.
        names = [*(path.name for path in own), *more, *map(os.path.basename, earlier)]
        for name in (*names, self.summary.name, self.metrics.name):
            if (self.path / name).exists():
                (self.path / name).rename(target / name)
        return (
            f"{self.path} has {steps:,} steps of an earlier attempt and no checkpoint, so the run starts again. "
            f"The files of the attempt are kept in {target}."
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
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _refuse_launcher() -> None:
    """Raise UserError if torchrun or another launcher started this process, since each process would train the run."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and {"RANK", "LOCAL_RANK"} <= os.environ.keys():
        raise UserError(
            f"This is one of {size} processes that torchrun, accelerate launch or the like started. Start Spurline "
            "once, without a launcher; it starts ranks itself, with plugins: [fsdp_backend] and "
            f"backend: {{name: fsdp, ranks: {size}}}."
        )


def _take_lock(lock: IO[str]) -> bool:
    """Try for a second to take the lock, since `is_in_use` may hold it briefly. Return whether it was taken."""
    deadline = time.monotonic() + 1.0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
        time.sleep(0.02)


class RunRecordFiles:
    """Writes config.json, eval_samples.jsonl and summary.json. The summary also has the status of the run."""

    def __init__(self, directory: RunDirectory, summary: Mapping[str, Any]) -> None:
        self._directory = directory
        self.summary: dict[str, Any] = dict(summary)

    def start(self, config: Mapping[str, Any], resume_step: int) -> None:
        """Write the config, mark the run as running, and drop sample answers of steps after `resume_step`."""
        with write_errors(self._directory.path):
            write_json(self._directory.config, config)
            self._write_status("running")
        if self._directory.eval_samples.exists():
            cut_back(self._directory.eval_samples, resume_step)

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the generated answers of one evaluation. Raises RunFailedError if writing fails."""
        if samples:
            text = "".join(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples)
            place = self._directory.eval_samples
            # `backslashreplace` writes half a surrogate pair as a JSON escape, since UTF-8 cannot encode it.
            with (
                write_errors(place),
                open(place, "a", encoding="utf-8", errors="backslashreplace", opener=own_file) as file,
            ):
                file.write(text)

    def data_notes(self) -> list[str]:
        """Return lines about the data: its size, and which rows were left out and why."""
        return [line for name, facts in self.summary["data"].items() for line in describe(name, facts)]

    def finish(self, status: str, error: str | None = None, given_up: Sequence[str] = ()) -> None:
        """Mark the run as finished, stopped, interrupted or failed. `given_up` has a line for each abandoned prompt."""
        if given_up:
            self.summary["given_up"] = list(given_up)
        self._write_status(status, error)

    def _write_status(self, status: str, error: str | None = None) -> None:
        self.summary |= {"status": status} | ({"error": error} if error is not None else {})
        write_json(self._directory.summary, self.summary)


def check_run_directory(run_dir: Path) -> None:
    """Raise RunDirectoryError if the folder is missing or not a run directory. The error lists runs in the folder."""
    if not run_dir.is_dir():
        raise RunDirectoryError(f"{run_dir}: no such folder. Give the run_dir of a run, such as runs/default.")
    if not _holds_a_run(run_dir):
        entries = sorted(run_dir.iterdir())
        runs = [str(entry) for entry in entries if entry.is_dir() and _holds_a_run(entry)]
        found = f"Runs in it: {listing(runs)}" if runs else f"It has: {listing(entry.name for entry in entries[:20])}"
        raise RunDirectoryError(
            f"{run_dir}: not a run directory, since it has no {METRICS_FILE} and no {SUMMARY_FILE}. {found}."
        )


def _holds_a_run(folder: Path) -> bool:
    # A config.json alone may belong to a model.
    return any((folder / name).exists() for name in (METRICS_FILE, SUMMARY_FILE))


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file is missing. Raises RunDirectoryError if reading fails."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            content = json.loads(file.read())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RunDirectoryError(f"{path}: not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise RunDirectoryError(f"{path}: contains a {type(content).__name__}, expected a JSON object.")
    return content
