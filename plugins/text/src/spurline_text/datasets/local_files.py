"""Find the files of a local dataset path, and open each as rows.

A local path never leads to the network. `json_rows` reads the rows of JSON files, `arrow_rows` all others.
"""

from __future__ import annotations

import functools
import glob
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import xxhash

from spurline.errors import DataError, listing, suggestion

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".csv")
"""Files that can be read, by the end of their name."""

_OTHER_SUFFIXES = (".ndjson", ".tsv", ".txt", ".gz", ".zst", ".zip", ".xz", ".bz2", ".tar", ".xlsx", ".pkl", ".yaml")


def looks_local(path: str) -> bool:
    """Return whether a dataset path is meant for this machine: it exists, or is written like a file or folder."""
    return (
        path.startswith((".", "/", "~", "\\"))
        or Path(path).suffix.lower() in SUFFIXES + _OTHER_SUFFIXES
        or glob.has_magic(path)
        or path.count("/") > 1
        or Path(path).exists()
    )


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def find_files(path: str) -> dict[str, list[Path]]:
    """Return the files of each split. A file or glob is split `train`; the files of a folder are sorted by name."""
    local = Path(path).expanduser()
    if local.is_dir():
        return _files_of_folder(local)
    if local.is_file():
        if local.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: cannot read files ending in {local.suffix!r}. Known: {', '.join(SUFFIXES)}.")
        return {"train": [local]}
    if glob.has_magic(path):
        matches = sorted(map(Path, glob.iglob(str(local), recursive=True)))
        files = [match for match in matches if match.is_file() and match.suffix.lower() in SUFFIXES]
        if not files:
            raise DataError(f"{path}: matches no file ending in {', '.join(SUFFIXES)}.{_neighbours(local)}")
        return {"train": files}
    if local.exists():
        raise DataError(f"{path}: is not a regular file. Write its rows into a file and give that.")
    raise DataError(f"{path}: no such file or folder.{_neighbours(local)}")


def _files_of_folder(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split, told apart by the words in their names as Hugging Face `datasets` does."""
    # Not above: it takes a second to import, which runs on files of JSON need not wait for.
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    root = folder.absolute()
    try:
        patterns = get_data_patterns(glob.escape(str(root)))
        resolved = DataFilesDict.from_patterns(patterns, base_path=glob.escape(str(root)))
    except (EmptyDatasetError, FileNotFoundError):
        resolved = {}
    splits = {
        str(split): sorted(
            folder / Path(file).relative_to(root) for file in files if Path(file).suffix.lower() in SUFFIXES
        )
        for split, files in resolved.items()
    }
    splits = {split: files for split, files in splits.items() if files}
    if not splits:
        names = [entry.name for entry in sorted(folder.iterdir())[:10]]
        raise DataError(f"{folder}: has no file ending in {', '.join(SUFFIXES)}. It contains: {listing(names)}.")
    return splits


def _neighbours(missing: Path) -> str:
    """Return the name most like the missing one, and the content of the nearest folder."""
    folder, name = nearest_folder(missing)
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix.lower() in SUFFIXES]
    return f"{suggestion(name, names)} {folder.absolute()} contains: {listing(names)}."


def nearest_folder(missing: Path) -> tuple[Path, str]:
    """Return the nearest existing folder above a missing path, and the name on the way that it lacks."""
    folder, name = missing.parent, missing.name
    while not folder.is_dir():
        folder, name = folder.parent, folder.name
    return folder, name


def digest_of_file(path: Path) -> str:
    """Return the xxh3-128 of the content, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


class Rows(Protocol):
    """Random access to the rows of an opened file or table."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Mapping[str, Any]: ...

    def location(self, row: int) -> str:
        """Return where a row is: `train.jsonl:12`, or `train.parquet row 11` (counted from 0)."""
        ...


class RowFile(Rows, Protocol):
    """Rows whose content has a digest."""

    @property
    def digest(self) -> str:
        """Hash of the content as it is now, so that a change while rows are read is noticed."""
        ...


class LocalFile:
    """The rows of a local file, which is opened for the first row. A pickled copy opens the file again."""

    def __init__(self, path: Path, open_rows: Callable[[Path], Rows]) -> None:
        self._path = path
        self._open_rows = open_rows

    @functools.cached_property
    def rows(self) -> Rows:
        """The opened file. Raises DataError when it cannot be read."""
        with self._readable():
            return self._open_rows(self._path)

    @property
    def digest(self) -> str:
        with self._readable():
            return digest_of_file(self._path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self.rows[row]

    def location(self, row: int) -> str:
        return self.rows.location(row)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self._path, self._open_rows)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror or error}.") from error
