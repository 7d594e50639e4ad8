"""Dataset `hf_stream`: read rows one after another, for data that does not fit on disk or in memory.

Data flow: config -> files, or a dataset on the hub -> rows in order -> source `stream`. A reader returns its
position as JSON, and a new reader can continue from this position. Nothing is copied into a cache.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import datasets

from spurline.errors import DataError
from spurline_text.configs import HfStreamConfig
from spurline_text.datasets.arrow_rows import data_errors, without_padding
from spurline_text.datasets.hf_dataset import default_label, of_split, refuse_hub_settings
from spurline_text.datasets.json_rows import read_json_line
from spurline_text.datasets.local_files import find_files, looks_local
from spurline_text.datasets.protocols import RowReader, StreamedRow
from spurline_text.hub import asked_once

_ROWS_AT_ONCE = 128
"""Rows of a parquet file in memory at once. By default the library reads row groups, which may be huge or empty."""


class HfStream:
    """Rows of JSON lines or parquet files, or of a hub dataset, in order."""

    def __init__(self, config: HfStreamConfig, *, registry: object = None) -> None:
        self._config = config
        self.label = config.label or default_label(config.path)
        self._files = _files(config) if looks_local(config.path) else None

    def open(self, position: Mapping[str, Any] | None = None) -> RowReader:
        config = self._config
        if self._files is None:
            with asked_once(), data_errors(config.path, prefix="cannot be streamed from the Hugging Face hub: "):
                rows: Any = datasets.load_dataset(
                    config.path, name=config.subset, split=config.split, revision=config.revision, streaming=True
                )
        elif self._files[0].suffix.lower() == ".jsonl":
            return JsonLinesReader(self._files, position, config.constants)
        else:
            names = [glob.escape(str(file.absolute())) for file in self._files]
            with data_errors(config.path):
                rows = datasets.load_dataset(
                    "parquet", data_files=names, split="train", streaming=True, batch_size=_ROWS_AT_ONCE
                )
        return TableReader(rows, config.path, position, config.constants)


def _files(config: HfStreamConfig) -> list[Path]:
    """Return the files of the split, in order. Raises DataError for files that cannot be read as one stream."""
    refuse_hub_settings(config)
    files = of_split(find_files(config.path), config.split, config.path)
    kinds = {file.suffix.lower() for file in files}
    if kinds not in ({".jsonl"}, {".parquet"}):
        raise DataError(
            f"{files[0]}: cannot be read as a stream. All files must end in .jsonl, or all in .parquet. To read other "
            "files, set the dataset's name: hf."
        )
    return files


class JsonLinesReader:
    """Reads the lines of files. Its position is the number of the file, and the next byte and line in the file."""

    def __init__(self, files: Sequence[Path], position: Mapping[str, Any] | None, constants: Mapping[str, Any]) -> None:
        self._files, self._constants = files, constants
        self._open(*(position["file"], *position["place"]) if position else (0, 0, 1))

    def _open(self, number: int, offset: int, line: int) -> None:
        self._number, self._offset, self._line = number, offset, line
        with data_errors(str(self._files[number])):
            self._file = self._files[number].open("rb")
        self._file.seek(offset)

    def read(self) -> StreamedRow | None:
        while True:
            for line in self._file:
                location = f"{self._files[self._number]}:{self._line}"
                self._offset, self._line = self._offset + len(line), self._line + 1
                if line.strip():
                    try:
                        return StreamedRow({**read_json_line(line, location), **self._constants}, location)
                    except DataError as error:
                        return StreamedRow(error, location)
            if self._number + 1 == len(self._files):
                return None
            self.close()
            self._open(self._number + 1, 0, 1)

    def position(self) -> dict[str, Any]:
        return {"file": self._number, "place": [self._offset, self._line]}

    def close(self) -> None:
        self._file.close()


class TableReader:
    """Reads a streaming dataset of Hugging Face `datasets`. The library keeps track of the position."""

    def __init__(
        self,
        rows: datasets.IterableDataset,
        name: str,
        position: Mapping[str, Any] | None,
        constants: Mapping[str, Any],
    ) -> None:
        self._table, self._name, self._constants = rows, name, constants
        self._row = int(position["row"]) if position else 0
        self._begun_at = position
        if position:
            # The state is JSON text, since it may contain values that a checkpoint cannot store.
            self._table.load_state_dict(json.loads(position["state"]))
        self._rows = cast("Iterator[Mapping[str, Any]]", iter(self._table))

    def read(self) -> StreamedRow | None:
        with data_errors(self._name):
            values = next(self._rows, None)
        if values is None:
            return None
        self._row, self._begun_at = self._row + 1, None
        return StreamedRow({**without_padding(dict(values)), **self._constants}, f"{self._name} row {self._row - 1}")

    def position(self) -> dict[str, Any]:
        if self._begun_at is not None:
            # Until the first row is read, the library returns its initial state, even after loading another state.
            return dict(self._begun_at)
        return {"row": self._row, "state": json.dumps(self._table.state_dict())}

    def close(self) -> None:
        pass
