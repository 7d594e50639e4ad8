"""Save what can still be saved when the run directory is gone.

In: a run whose directory was removed or moved, between two steps. Out: a run directory beside the lost one, or in the
system's temporary folder, with a checkpoint of the last finished step; the same config goes on from there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from spurline.errors import CheckpointWriteError
from spurline.run.directory import RunDirectory


def rescue(lost: Path, step: int, save: Callable[[RunDirectory], None]) -> tuple[RunDirectory | None, list[str]]:
    """Save into the first folder that takes it; returns its directory, and a line for each that did not.

    save: writes the checkpoint and the record into the directory it is given.
    """
    failures: list[str] = []
    for make in _places(lost, step):
        try:
            directory = RunDirectory(make())
            save(directory)
        except (OSError, CheckpointWriteError) as error:
            failures.append(str(error))
        else:
            return directory, failures
    return None, failures


def _places(lost: Path, step: int) -> Iterator[Callable[[], Path]]:
    yield lambda: _new_folder(lost.parent, f"{lost.name}-rescued-{step}")
    yield lambda: Path(tempfile.mkdtemp(prefix=f"{lost.name}-rescued-{step}-"))


def _new_folder(parent: Path, name: str) -> Path:
    """With a number behind, when an earlier rescue has taken the name."""
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise OSError(f"{parent} has 999 folders {name} already")
