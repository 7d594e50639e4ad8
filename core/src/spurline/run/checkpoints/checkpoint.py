"""Write, verify and read checkpoints on disk. A checkpoint is complete or absent, and has no pickle files.

A checkpoint is one folder `step-00000123` under RUN_DIR/checkpoints:

    manifest.json       format, version, step, config, distribution versions, the history of changed settings, the best
                        evaluation so far, a fingerprint of the held-out data, and the size and XXH3 digest of every
                        other file. Files that the backend verifies itself when it reads them are marked.
    backend/            files of the backend: model, optimizer, scheduler, RNG states
    components/         state of the source, mini-batches, loss and trackers, if they have any
    hooks/              state of plugins, by plugin and name

The folder is written under a hidden name, flushed to disk, and renamed. Only then is its name written to the file
`latest`, for people and scripts. The file `best` names the checkpoint with the best evaluation, if one is kept. The
module `state_files` writes the state of components.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from spurline.digests import FileDigest, digest_file, verify_files
from spurline.errors import CheckpointError, CheckpointWriteError, DamagedCheckpointError, listing
from spurline.files import remove, sync_file, write_json, write_text

FORMAT = "spurline-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
_BY_WRITER = "digest_by_writer"
"""Key that marks a file in the manifest. The backend verifies such a file itself when it reads it."""
LATEST = "latest"
"""File that names the newest checkpoint."""
BACKEND = "backend"
"""Folder of the backend's files."""
_STEP_FOLDER = re.compile(r"step-\d{8,18}")
BEST = "best"
"""File that names the checkpoint with the best evaluation."""

_attempts = count(1)
"""Numbers that make the names of this process's hidden folders distinct."""


@dataclass(frozen=True)
class Written:
    """Files that are already hashed and forced to disk.

    Attributes:
        digests: Digests by path in the checkpoint's folder.
        by_reader: Paths of the files that the backend verifies itself when it reads them.
    """

    digests: Mapping[str, FileDigest]
    by_reader: Collection[str] = ()


Write = Callable[[Path], Written | None]
"""A function that fills a folder. Files that are not in its result are hashed and flushed afterwards."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, with the contents of its manifest.json."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the resolved settings of the run that saved it."""
        return self.manifest["config"]

    def unverified(self, folder: str) -> dict[str, FileDigest]:
        """Return the digests, by path in `folder`, of those files in it that `open_checkpoint` did not read."""
        prefix = f"{folder}/"
        return {
            name.removeprefix(prefix): FileDigest(entry["bytes"], entry["xxh3"])
            for name, entry in self.manifest["files"].items()
            if name.startswith(prefix) and entry.get(_BY_WRITER)
        }


class CheckpointStore:
    """The checkpoints of one run directory. The caller holds the directory's lock."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, step: int, write: Write, facts: Mapping[str, Any], best: int | None = None) -> Path:
        """Write one checkpoint and make it the latest, by `prepare` and `publish`."""
        return self.publish(step, self.prepare(step, write, facts), best)

    def prepare(self, step: int, write: Write, facts: Mapping[str, Any]) -> Path:
        """Write one complete and durable checkpoint under a hidden name, and return its folder.

        The manifest includes `facts`. Raises CheckpointWriteError if the disk cannot be written. Earlier checkpoints
        then stay intact.
        """
        temporary = self.root / f".writing-{self._folder(step).name}-{os.getpid()}-{next(_attempts)}"
        try:
            # This does not create parent folders, so it fails if the run directory has been removed meanwhile.
            self.root.mkdir(exist_ok=True)
            remove(temporary)
            temporary.mkdir()
            written = write(temporary) or Written({})
            entries = sorted(temporary.rglob("*"))
            files = _file_entries(temporary, [entry for entry in entries if entry.is_file()], written)
            manifest = {"format": FORMAT, "version": VERSION, "step": step, **facts, "files": files}
            write_json(temporary / MANIFEST, manifest)
            for folder in (entry for entry in entries if entry.is_dir()):
                sync_file(folder)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, (OSError, CheckpointWriteError)):
                raise self._write_failure(step, error) from error
            raise
        return temporary

    def publish(self, step: int, prepared: Path, best: int | None = None) -> Path:
        """Make the prepared checkpoint the latest, and return its folder. `best` is the step with the best evaluation.

        Raises CheckpointWriteError if the disk cannot be written.
        """
        final = self._folder(step)
        try:
            # Delete an earlier checkpoint of this step last, since it may be the only checkpoint.
            replaced = self._put_away(final) if os.path.lexists(final) else None
            prepared.rename(final)
            if replaced is not None:
                remove(replaced)
            sync_file(self.root)
            write_text(self.root / LATEST, final.name + "\n")
            self.point_to_best(best)
        except OSError as error:
            raise self._write_failure(step, error) from error
        finally:
            shutil.rmtree(prepared, ignore_errors=True)
        return final

    def point_to_best(self, step: int | None) -> None:
        """Write the name of this step's checkpoint to the file `best`. None removes the file."""
        if step is None:
            (self.root / BEST).unlink(missing_ok=True)
        elif not (self.root / BEST).exists() or self._named(BEST) != self._folder(step):
            write_text(self.root / BEST, self._folder(step).name + "\n")

    def prune(self, keep_last: int, best: int | None = None) -> None:
        """Remove all checkpoints except the newest `keep_last` and the checkpoint of step `best`.

        Also remove the checkpoints that `set_aside_after` renamed, once their steps have been trained again.
        """
        paths = self.paths()
        for path in paths[:-keep_last]:
            if best is None or path != self._folder(best):
                self._remove(path)
        for path in self.root.glob("superseded-step-*"):
            if paths and path.name.removeprefix("superseded-") <= paths[-1].name:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        # Rename the folder first. A kill during the deletion then leaves no half checkpoint under its name.
        remove(self._put_away(path))

    def _put_away(self, path: Path) -> Path:
        return path.rename(path.with_name(f".removing-{path.name}-{os.getpid()}"))

    def clean(self) -> None:
        """Remove folders that killed processes left half written or half removed."""
        for pattern in (".writing-*", ".removing-*", f".{LATEST}.*.tmp", f".{BEST}.*.tmp"):
            for path in self.root.glob(pattern):
                remove(path)

    def paths(self) -> list[Path]:
        """Return the folders of all checkpoints, oldest step first."""
        return sorted(path for path in self.root.glob("step-*") if _STEP_FOLDER.fullmatch(path.name))

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints after `step`, and return their new paths. Their steps will be trained again."""
        moved: list[Path] = []
        for path in self.paths():
            if int(path.name.removeprefix("step-")) > step:
                target = path.with_name(f"superseded-{path.name}")
                if os.path.lexists(target):
                    self._remove(target)
                moved.append(path.rename(target))
        return moved

    def latest(self, option: str = "--resume") -> Checkpoint | None:
        """Return the newest checkpoint, verified, or None if there is none.

        Raises CheckpointError if it is damaged. The error names a good checkpoint, and how to select it with `option`.
        """
        # Do not use the file `latest`: after a kill in `publish`, it may not name the newest complete checkpoint.
        candidates = self.paths()
        if not candidates:
            return None
        try:
            return open_checkpoint(candidates[-1])
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self.offer_before(candidates[-1], option)}") from error

    def chosen(self, choice: str | Path | None, option: str = "--checkpoint") -> Checkpoint:
        """Return the chosen checkpoint. Raises CheckpointError.

        Args:
            choice: `latest` (also if None), `best`, or the path of a checkpoint or of a run directory (its latest one).
            option: The option of the command line that made the choice, for messages.
        """
        if choice is None or choice == LATEST:
            latest = self.latest(option)
            if latest is None:
                resumes = option == "--resume"
                fix = "Leave out --resume to begin a new run." if resumes else "Train it first: spurline train."
                raise CheckpointError(f"{self.root.parent} has no checkpoint. {fix}")
            return latest
        known = f"Checkpoints of {self.root.parent}: {listing(map(str, self.paths()))}."
        if choice == BEST:
            if not (self.root / BEST).exists():
                what = "has no best checkpoint: train with checkpoint.keep_best, or choose another one."
                raise CheckpointError(f"{self.root.parent} {what} {known}")
            return open_checkpoint(self._named(BEST))
        path = Path(choice)
        if not path.is_dir():
            what = "there is no folder of this name. Give latest, best or the path of a checkpoint."
            raise CheckpointError(f"{option} {choice}: {what} {known}")
        inside = CheckpointStore(path / "checkpoints").latest(option) if (path / "checkpoints").is_dir() else None
        return inside if inside is not None else open_checkpoint(path)

    def _folder(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def _named(self, pointer: str) -> Path:
        return self.root / (self.root / pointer).read_text(encoding="utf-8").strip()

    def offer_before(self, damaged: Path, option: str = "--resume") -> str:
        """Return a sentence that names the newest good checkpoint before a damaged one, and the option to take it."""
        for path in reversed([path for path in self.paths() if path.name < damaged.name]):
            try:
                good = open_checkpoint(path)
                verify_files(path / BACKEND, good.unverified(BACKEND))
            except CheckpointError:  # An older checkpoint may be good.
                continue
            return f"The newest good checkpoint is of step {good.step}: use `{option} {good.path}`."
        return "There is no other good checkpoint; start again with another run_dir, or empty this one."

    def _write_failure(self, step: int, error: Exception) -> CheckpointWriteError:
        folder = next(place for place in (self.root, *self.root.absolute().parents) if place.exists())
        free = shutil.disk_usage(folder).free / 2**20
        kept = [path.name for path in self.paths()]
        have = f"Kept: {', '.join(kept)}." if kept else "There is no earlier checkpoint."
        return CheckpointWriteError(
            f"The checkpoint of step {step} cannot be written to {self.root}: {error} ({free:,.0f} MiB free on that "
            f"disk). {have} Free some space, or lower checkpoint.keep_last, and run again to resume."
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint folder and compare every file with the size and digest in the manifest.

    Files that the backend verifies itself are not read here (see `Checkpoint.unverified`). Raises CheckpointError.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint folder.")
    manifest = _read_manifest(path)
    digests = {name: FileDigest(entry["bytes"], entry["xxh3"]) for name, entry in manifest["files"].items()}
    verify_files(path, digests, only_sizes={name for name, entry in manifest["files"].items() if entry.get(_BY_WRITER)})
    return Checkpoint(path, manifest)


def _file_entries(folder: Path, files: Sequence[Path], written: Written) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries of all files, and force the files to disk."""
    entries: dict[str, dict[str, Any]] = {}
    # Some libraries create files that only their owner can read. Use the permissions of the folder, since the umask
    # cannot be read without changing it for other threads. Hard links belong to another checkpoint too.
    permissions = folder.stat().st_mode & 0o666
    for file in files:
        if file.stat().st_nlink == 1:
            file.chmod(permissions)
        name = str(file.relative_to(folder))
        digest = written.digests.get(name) or digest_file(file, sync=True)
        if file.stat().st_size != digest.num_bytes:
            raise CheckpointWriteError(
                f"{name} has {file.stat().st_size} bytes, and its writer says that it wrote {digest.num_bytes}."
            )
        entries[name] = {"bytes": digest.num_bytes, "xxh3": digest.xxh3}
        if name in written.by_reader:
            entries[name][_BY_WRITER] = True
    unseen = sorted(written.digests.keys() - entries.keys())
    if unseen:
        raise CheckpointWriteError(
            f"{len(unseen)} files that were written are missing, such as {unseen[0]}: processes on other machines "
            "wrote them to a disk of their own. Put run_dir on storage that all machines share."
        )
    return entries


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a Spurline checkpoint: it has no {MANIFEST}.") from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"Checkpoint {path} is damaged: {MANIFEST} is not valid JSON: {error}.") from error
    except OSError as error:
        raise CheckpointError(f"Checkpoint {path}: {MANIFEST} cannot be read ({error.strerror}).") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a Spurline checkpoint: its {MANIFEST} has another format.")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"Checkpoint {path} has layout version {manifest.get('version')}; this spurline reads version {VERSION}. "
            f"It was saved by spurline {manifest.get('versions', {}).get('spurline', '?')}: use that version."
        )
    files: Any = manifest.get("files")
    if not isinstance(manifest.get("step"), int) or not isinstance(manifest.get("config"), dict):
        raise DamagedCheckpointError(f"Checkpoint {path} is damaged: {MANIFEST} has no step and config.")
    if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise DamagedCheckpointError(f"Checkpoint {path} is damaged: {MANIFEST} does not list files of this folder.")
    return manifest


def _is_entry(name: str, entry: Any) -> bool:
    """Return whether an entry describes a file, by a path that does not lead out of the folder."""
    if not name or "\0" in name or name.startswith("/") or ".." in name.split("/"):
        return False
    return isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("xxh3"), str)
