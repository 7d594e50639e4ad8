"""The files that a local dataset path stands for, and what one of them is to a reader of rows.

What is local never goes to the network. Rows of JSON files are read by `json_rows`, all others by `arrow_rows`.
"""

from __future__ import annotations

import difflib
import errno
import functools
import glob
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from spurline.errors import DataError, listing
from spurline_text.datasets.file_digest import digest_of_file

if TYPE_CHECKING:
    import pyarrow

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
    """Split name -> files. A file or glob is split `train`; the files of a folder are sorted by their names."""
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
    """Files of a folder by split, told apart by the words in their names as Hugging Face `datasets` does."""
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
    """` Did you mean ...?`, or what the folder holds instead."""
    folder = missing.parent
    while glob.has_magic(str(folder)):
        folder = folder.parent
    if not folder.is_dir():
        return f" The folder {folder} does not exist.{_similar(folder.parent, folder.name)}"
    return _similar(folder, missing.name) or _contents(folder)


def _similar(folder: Path, name: str) -> str:
    if not folder.is_dir():
        return ""
    names = [entry.name for entry in folder.iterdir()]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    # Names that have little in common but their ending are no slips of the pen.
    stem = Path(name).stem
    close = [match for match in close if difflib.SequenceMatcher(None, stem, Path(match).stem).ratio() >= 0.6]
    return f" Did you mean {' or '.join(str(folder / match) for match in close)}?" if close else ""


def _contents(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix.lower() in SUFFIXES)
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return f" {folder.absolute()} contains: {shown or '(no data files)'}."


class LocalRows(Protocol):
    """Rows of an opened local file."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Mapping[str, Any]: ...

    def location(self, row: int) -> str:
        """Return where a row is: `train.jsonl:12`, or `train.parquet row 11` (counted from 0)."""
        ...


class RowFile(LocalRows, Protocol):
    """Random access to the rows of one file or table."""

    @property
    def digest(self) -> str:
        """Hash of the content as it is now, so that a change while rows are read can be told."""
        ...


@runtime_checkable
class HoldsTable(LocalRows, Protocol):
    """Rows that are stored as an Arrow table."""

    def arrow(self, start: int, stop: int) -> pyarrow.Table:
        """Rows [start, stop) as the table holds them."""
        ...


class LocalFile:
    """The rows of a local file, opened when first asked for: telling whether it changed must not cost reading it.

    Can be pickled; the copy opens the file again.
    """

    def __init__(self, path: Path, open_rows: Callable[[Path], LocalRows]) -> None:
        self._path = path
        self._open_rows = open_rows
        if not os.access(path, os.R_OK):
            raise DataError(f"{path}: cannot be read: {os.strerror(errno.EACCES)}.")

    @functools.cached_property
    def rows(self) -> LocalRows:
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
