"""Built-in dataset `hf`: local files and folders, or a name on the Hugging Face hub, with split strings.

Place on the way: config -> files (local_files) -> rows of each file (row_files, arrow_rows) -> the rows of the split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from spurline.builtin.configs import HfDatasetConfig
from spurline.data.arrow_rows import ArrowRows, load_file, load_hub, load_saved
from spurline.data.local_files import find_files, is_saved_dataset, looks_local
from spurline.data.row_files import JsonArray, JsonLines, RowFile, open_json
from spurline.data.splits import resolve_split
from spurline.errors import DataError, listing, suggestion


class _Split:
    """The files of one split, end to end."""

    def __init__(self, files: list[RowFile]) -> None:
        self._files = files
        self._ends = list(accumulate(len(file) for file in files))

    def __len__(self) -> int:
        return self._ends[-1]

    def find(self, row: int) -> tuple[RowFile, int]:
        """The file of a row, and the row's number there."""
        index = bisect_right(self._ends, row)
        file = self._files[index]
        return file, row - (self._ends[index] - len(file))

    def digests(self) -> list[str]:
        return [file.digest for file in self._files]

    def check(self, rows: range) -> None:
        """Raise DataError for the first of these rows that is not readable."""
        for file, end in zip(self._files, self._ends, strict=True):
            if isinstance(file, (JsonLines, JsonArray)):
                begin = end - len(file)
                file.check(range(max(rows.start - begin, 0), min(rows.stop - begin, len(file))))


class HfDataset:
    """Rows of local files, of a saved dataset or of a hub dataset. Can be pickled; rows are not copied along."""

    def __init__(self, config: HfDatasetConfig) -> None:
        self._path = config.path
        opener = _local_splits(config) if looks_local(config.path) else _HubSplits(config)
        self._parts = resolve_split(config.split, opener.open, config.path)
        self._ends = list(accumulate(len(rows) for _, rows in self._parts))
        self.label = config.label or _default_label(config.path)
        if len(self) == 0:
            sizes = ", ".join(str(len(split)) for split, _ in self._parts)
            raise DataError(f"{config.path}: split {config.split!r} is empty; the data has {sizes} rows.")
        if config.on_bad_row == "error":
            for split, rows in self._parts:
                split.check(rows)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        file, place = self._find(row)
        return file[place]

    def location(self, row: int) -> str:
        """`train.jsonl:12`, or `train.parquet row 11` (counted from 0 in the file) where lines mean nothing."""
        file, place = self._find(row)
        return file.location(place)

    def fingerprint(self) -> str:
        """Hash of the content of all files and of the rows chosen by `split`; names and folders do not matter."""
        digest = xxhash.xxh3_128()
        for split, rows in self._parts:
            digest.update("\0".join((*split.digests(), str(rows.start), str(rows.stop), "")).encode())
        return digest.hexdigest()

    def _find(self, row: int) -> tuple[RowFile, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {self._path}, which has {len(self)} rows")
        index = bisect_right(self._ends, row)
        split, rows = self._parts[index]
        return split.find(rows[row - (self._ends[index] - len(rows))])


class _FileSplits:
    """Splits of local files, opened when asked for."""

    def __init__(self, path: str, files: dict[str, list[Path]]) -> None:
        self._path, self._files = path, files

    def open(self, name: str) -> _Split:
        if name not in self._files:
            raise _no_such_split(self._path, name, list(self._files))
        return _Split([_open_file(file) for file in self._files[name]])


class _SavedSplits:
    """Splits of a `save_to_disk` folder."""

    def __init__(self, path: str) -> None:
        self._path, self._tables = path, load_saved(Path(path).expanduser())

    def open(self, name: str) -> _Split:
        if name not in self._tables:
            raise _no_such_split(self._path, name, list(self._tables))
        return _Split([self._tables[name]])


class _HubSplits:
    """Splits of a hub dataset."""

    def __init__(self, config: HfDatasetConfig) -> None:
        self._config = config

    def open(self, name: str) -> _Split:
        return _Split([load_hub(self._config.path, self._config.subset, self._config.revision, name)])


def _local_splits(config: HfDatasetConfig) -> _FileSplits | _SavedSplits:
    for setting in ("subset", "revision"):
        if getattr(config, setting) is not None:
            raise DataError(f"{config.path}: {setting} is for hub datasets, but this path is local. Remove {setting}.")
    if is_saved_dataset(Path(config.path).expanduser()):
        return _SavedSplits(config.path)
    return _FileSplits(config.path, find_files(config.path))


def _open_file(path: Path) -> JsonLines | JsonArray | ArrowRows:
    suffix = path.suffix.lower()
    try:
        if suffix == ".jsonl":
            return JsonLines(path)
        return open_json(path) if suffix == ".json" else load_file(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error


def _no_such_split(path: str, name: str, known: list[str]) -> DataError:
    note = " A file or glob is one split, 'train'." if known == ["train"] and not Path(path).is_dir() else ""
    return DataError(f"{path}: has no split {name!r}.{suggestion(name, known)} Splits: {listing(known)}.{note}")


def _default_label(path: str) -> str:
    """File stem, folder name, the folder of a glob, or the hub name."""
    if not looks_local(path):
        return path
    place = Path(path).expanduser()
    if place.is_file():
        return place.stem
    while "*" in place.name or "?" in place.name or "[" in place.name:
        place = place.parent
    return place.name or place.absolute().name
