"""Dataset `hf_stream`: rows one after another, for data larger than disk or memory should hold.

Place on the way: config -> files, or a hub dataset that stays on the hub -> rows in order -> source `stream`. A reader
gives its position as JSON, and another one goes on from there. Nothing is copied into a cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import datasets
import pyarrow.parquet

from spurline.errors import DataError, listing
from spurline.protocols.dataset import RowReader, StreamedRow
from spurline_text.configs import HfStreamConfig
from spurline_text.datasets.arrow_rows import data_errors, without_padding
from spurline_text.datasets.hf_dataset import default_label, of_split, refuse_hub_settings
from spurline_text.datasets.json_rows import read_json_line
from spurline_text.datasets.local_files import find_files, looks_local
from spurline_text.hub import asked_once

_ROWS_AT_ONCE = 128
"""Rows of a parquet file that are converted together."""


class HfStream:
    """Rows of JSON lines and parquet files, or of a hub dataset, in order."""

    def __init__(self, config: HfStreamConfig) -> None:
        self._config = config
        self.label = config.label or default_label(config.path)
        self._files = _files(config) if looks_local(config.path) else None

    def open(self, position: Mapping[str, Any] | None = None) -> RowReader:
        """Return a reader at the beginning, or where another reader was."""
        if self._files is not None:
            return FilesReader(self._files, position)
        config = self._config
        with asked_once(), data_errors(config.path, prefix="cannot be streamed from the Hugging Face hub: "):
            rows = datasets.load_dataset(
                config.path, name=config.subset, split=config.split, revision=config.revision, streaming=True
            )
        assert isinstance(rows, datasets.IterableDataset), type(rows)
        return HubReader(rows, config.path, position)


def _files(config: HfStreamConfig) -> list[Path]:
    """Return the files of the split, in order. Raises DataError for a file that cannot be read as a stream."""
    refuse_hub_settings(config)
    files = of_split(find_files(config.path), config.split, config.path)
    for file in files:
        if file.suffix.lower() not in _READERS:
            raise DataError(
                f"{file}: cannot be read as a stream. Files that can: {listing(_READERS)}. Convert it, or read it with "
                "dataset name: hf."
            )
    return files


class FilesReader:
    """Reads files one after another. Its position is the number of the file, and the place in it."""

    def __init__(self, files: Sequence[Path], position: Mapping[str, Any] | None) -> None:
        self._files = files
        self._number = int(position["file"]) if position else 0
        self._inside: _FileReader | None = None
        if position and self._number < len(files):
            self._inside = _open(files[self._number], position["place"])

    def read(self) -> StreamedRow | None:
        while self._number < len(self._files):
            if self._inside is None:
                self._inside = _open(self._files[self._number], None)
            row = self._inside.read()
            if row is not None:
                return row
            self._inside.close()
            self._inside, self._number = None, self._number + 1
        return None

    def position(self) -> dict[str, Any]:
        return {"file": self._number, "place": None if self._inside is None else self._inside.place()}

    def close(self) -> None:
        if self._inside is not None:
            self._inside.close()


class JsonLinesReader:
    """Reads the lines of a file. Its place is the byte and the line that come next."""

    def __init__(self, path: Path, place: Sequence[int] | None) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb")
        self._offset, self._line = place or (0, 1)
        self._file.seek(self._offset)

    def read(self) -> StreamedRow | None:
        for line in self._file:
            location = f"{self._path}:{self._line}"
            self._offset, self._line = self._offset + len(line), self._line + 1
            if line.strip():
                try:
                    return StreamedRow(read_json_line(line, location), location)
                except DataError as error:
                    return StreamedRow(error, location)
        return None

    def place(self) -> list[int]:
        return [self._offset, self._line]

    def close(self) -> None:
        self._file.close()


class ParquetReader:
    """Reads the rows of a parquet file, a few at a time. Its place is the row that comes next."""

    def __init__(self, path: Path, place: int | None) -> None:
        self._path = path
        with data_errors(str(path)):
            self._table = pyarrow.parquet.ParquetFile(path)
        self._row = place or 0
        self._rows = self._from(self._row)

    def read(self) -> StreamedRow | None:
        values = next(self._rows, None)
        if values is None:
            return None
        self._row += 1
        return StreamedRow(without_padding(values), f"{self._path} row {self._row - 1}")

    def place(self) -> int:
        return self._row

    def close(self) -> None:
        self._table.close()

    def _from(self, row: int) -> Iterator[dict[str, Any]]:
        """Yield the rows from this one on; row groups before it are not read."""
        for group in range(self._table.num_row_groups):
            num_rows = self._table.metadata.row_group(group).num_rows
            if row >= num_rows:
                row -= num_rows
                continue
            with data_errors(f"{self._path} row group {group}"):
                for batch in self._table.iter_batches(_ROWS_AT_ONCE, row_groups=[group]):
                    rows = batch.slice(min(row, len(batch)))
                    row -= len(batch) - len(rows)
                    yield from rows.to_pylist()


class HubReader:
    """Reads an iterable dataset of Hugging Face `datasets`, which knows its own place."""

    def __init__(self, rows: datasets.IterableDataset, name: str, position: Mapping[str, Any] | None) -> None:
        self._table, self._name = rows, name
        self._row = int(position["row"]) if position else 0
        self._begun_at = position
        if position:
            # Kept as text: the state of the library may hold values that a checkpoint cannot.
            self._table.load_state_dict(json.loads(position["state"]))
        self._rows = cast("Iterator[Mapping[str, Any]]", iter(self._table))

    def read(self) -> StreamedRow | None:
        with data_errors(self._name, prefix="cannot be streamed: "):
            values = next(self._rows, None)
        if values is None:
            return None
        self._row, self._begun_at = self._row + 1, None
        return StreamedRow(without_padding(dict(values)), f"{self._name} row {self._row - 1}")

    def position(self) -> dict[str, Any]:
        if self._begun_at is not None:
            # Before the first row, the library gives the beginning as its state, also after loading another one.
            return dict(self._begun_at)
        return {"row": self._row, "state": json.dumps(self._table.state_dict())}

    def close(self) -> None:
        pass


_FileReader = JsonLinesReader | ParquetReader
_READERS: Mapping[str, Callable[[Path, Any], _FileReader]] = {".jsonl": JsonLinesReader, ".parquet": ParquetReader}


def _open(path: Path, place: Any) -> _FileReader:
    try:
        return _READERS[path.suffix.lower()](path, place)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error
