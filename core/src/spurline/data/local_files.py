"""The files that a local dataset path stands for, and their rows, with the place of each row for error messages.

What is local never goes to the network. JSON and JSON lines are read here, line by line, because rows whose fields
differ in type must stay readable and a malformed line must be named; all other formats are loaded by Hugging Face
`datasets` (see `arrow_rows`).
"""

from __future__ import annotations

import difflib
import errno
import functools
import glob
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

from spurline.data.file_digest import digest_of_file
from spurline.data.rows import describe
from spurline.errors import DataError, listing

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".csv")
"""Files that can be read, by the end of their name."""

_OTHER_SUFFIXES = (
    ".ndjson",
    ".tsv",
    ".txt",
    ".gz",
    ".zst",
    ".zip",
    ".xz",
    ".bz2",
    ".tar",
    ".xlsx",
    ".pkl",
    ".yaml",
)


def looks_local(path: str) -> bool:
    """Whether a dataset path means something on this machine: it exists, or is written like a file or folder."""
    return (
        path.startswith((".", "/", "~", "\\"))
        or Path(path).suffix.lower() in SUFFIXES + _OTHER_SUFFIXES
        or glob.has_magic(path)
        or path.count("/") > 1
        or Path(path).exists()
    )


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
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
        matches = sorted(Path(match) for match in glob.glob(str(local), recursive=True))
        files = [match for match in matches if match.is_file() and match.suffix.lower() in SUFFIXES]
        if not files:
            raise DataError(f"{path}: matches no file ending in {', '.join(SUFFIXES)}.{_neighbours(local)}")
        return {"train": files}
    raise DataError(f"{path}: no such file or folder.{_neighbours(local)}")


def _files_of_folder(folder: Path) -> dict[str, list[Path]]:
    """Files of a folder by split, told apart by the words in their names as Hugging Face `datasets` does."""
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
        """Where a row is: `train.jsonl:12`, or `train.parquet row 11` (counted from 0)."""
        ...


class RowFile(LocalRows, Protocol):
    """Random access to the rows of one file or table."""

    @property
    def digest(self) -> str:
        """Hash of the content as it is now, so that a change while rows are read can be told."""
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


class JsonLines:
    """One JSON object per line; blank lines are passed over. Holds only where lines begin."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._sizes, self._lines = array("q"), array("q"), array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._starts.append(offset)
                    self._sizes.append(len(line))
                    self._lines.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        with self._path.open("rb") as file:
            return self._read(file, row)

    def location(self, row: int) -> str:
        return f"{self._path}:{self._lines[row]}"

    def check(self, rows: range) -> None:
        """Raise DataError for the first of these rows that is not a JSON object."""
        with self._path.open("rb") as file:
            for row in rows:
                self._read(file, row)

    def _read(self, file: BinaryIO, row: int) -> Mapping[str, Any]:
        file.seek(self._starts[row])
        return read_json_line(file.read(self._sizes[row]), self.location(row))


def read_json_line(line: bytes, location: str) -> Mapping[str, Any]:
    """The object on one line. Raises DataError with `location` in front."""
    try:
        values = json.loads(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not valid UTF-8: {error.reason} at byte {error.start + 1}.") from error
    except json.JSONDecodeError as error:
        hint = " A file with one JSON list should end in .json." if line.lstrip().startswith(b"[") else ""
        raise DataError(f"{location}: not valid JSON: {error.msg} (column {error.pos + 1}).{hint}") from error
    except RecursionError as error:
        raise DataError(f"{location}: not valid JSON: nested too deeply.") from error
    return _require_object(values, location)


class JsonArray:
    """One JSON list of objects, held in memory."""

    def __init__(self, path: Path, rows: list[Any]) -> None:
        self._path = path
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return _require_object(self._rows[row], self.location(row))

    def location(self, row: int) -> str:
        return f"{self._path} row {row}"

    def check(self, rows: range) -> None:
        """Raise DataError for the first of these rows that is not a JSON object."""
        for row in rows:
            self[row]


def _require_object(values: Any, location: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise DataError(f"{location}: is {describe(values)}, expected a JSON object with named fields.")
    return values


def open_json(path: Path) -> JsonLines | JsonArray:
    """Rows of a .json file: a list of objects, or JSON lines under that name."""
    content = path.read_bytes()
    start = content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start != b"[":
        lines = JsonLines(path)
        if start == b"{" and len(lines) > 1 and not _is_json(content.splitlines()[0]) and _is_json(content):
            raise DataError(
                f"{path}: holds one JSON object. Expected a list of objects, or one object per line, each a row."
            )
        return lines
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno}).") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not valid UTF-8: {error.reason}.") from error
    return JsonArray(path, rows)


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True
