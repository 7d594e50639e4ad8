"""Rows that Hugging Face `datasets` loads: parquet, arrow and CSV files, `save_to_disk` folders, hub datasets.

Loaded tables are memory-mapped from the datasets cache. The name of the cache folder contains the digest of the file,
so a changed file is never read from an old cache. Nothing is written into the folder of the data.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import glob
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import xxhash
from datasets import Features, Json, Value
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DatasetsError

from spurline.errors import DataError
from spurline.files import private_folder
from spurline_text.datasets.local_files import digest_of_file
from spurline_text.hub import asked_once

_BLOCK = 128
"""Rows converted to Python at once. Converting single rows is several times slower."""
_ROWS_EXPANDED = 1000
"""Rows that are in memory at once while a parquet file is copied into the cache."""


class ArrowRows:
    """Rows of one loaded table. Messages show `name`. `find_digest` computes the digest of the rows."""

    def __init__(self, table: datasets.Dataset, name: str, find_digest: Callable[[], str]) -> None:
        self._table = table
        self._plain = table.with_format("arrow")
        self._features = Features({name: _without_files(feature) for name, feature in table.features.items()})
        self._name = name
        self._find_digest = find_digest
        self._block: tuple[int, list[dict[str, Any]]] = (0, [])

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        start, rows = self._block
        if not start <= row < start + len(rows):
            start = row - row % _BLOCK
            stop = min(start + _BLOCK, len(self))
            with data_errors(f"{self._name} rows {start} to {stop - 1}"):
                table: Any = self._plain[start:stop]
                # In a broken file, offsets may point outside the data.
                table.validate(full=True)
            columns = self._features.decode_batch(table.to_pydict())
            rows = [{name: without_padding(columns[name][i]) for name in columns} for i in range(stop - start)]
            self._block = (start, rows)
        return rows[row - start]

    @property
    def digest(self) -> str:
        return self._find_digest()

    def location(self, row: int) -> str:
        return f"{self._name} row {row}"


def _without_files(feature: Any) -> Any:
    """Return the feature with decoding turned off, so that `datasets` does not open image or sound files."""
    if isinstance(feature, dict):
        return {name: _without_files(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_without_files(inner) for inner in feature]
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=_without_files(feature.feature))
    is_in_the_row = not hasattr(feature, "decode") or isinstance(feature, Json)
    return feature if is_in_the_row else dataclasses.replace(feature, decode=False)


def load_file(path: Path) -> ArrowRows:
    """Load the rows of a .parquet, .arrow or .csv file. Raises DataError if it cannot be read."""
    cache = _cache_folder() / digest_of_file(path)
    builder = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}[path.suffix.lower()]
    options: dict[str, Any] = {}
    if builder == "csv":
        # All values of a CSV file are text. An answer `42` or `NA` must not become a number or a missing value.
        options = {"features": _csv_columns(path), "keep_default_na": False}
    elif builder == "parquet":
        # By default the library decompresses a whole row group at once.
        options = {"batch_size": _ROWS_EXPANDED}
    with _quiet(), data_errors(str(path)):
        table = datasets.load_dataset(
            builder, data_files=glob.escape(str(path.absolute())), split="train", cache_dir=str(cache), **options
        )
    return ArrowRows(table, str(path), functools.partial(digest_of_file, path))  # type: ignore[arg-type]


def load_saved(path: Path) -> dict[str, ArrowRows]:
    """Return the rows of each split of a folder written by `save_to_disk`. A single dataset gets the key `train`."""
    with data_errors(str(path)):
        saved = datasets.load_from_disk(str(path))
    tables = {str(name): table for name, table in saved.items()} if isinstance(saved, dict) else {"train": saved}
    return {
        name: ArrowRows(table, str(path), functools.partial(_digest_of_table, table)) for name, table in tables.items()
    }


def _digest_of_table(table: datasets.Dataset) -> str:
    digests = [digest_of_file(Path(name)) for name in sorted(file["filename"] for file in table.cache_files)]
    return xxhash.xxh3_128_hexdigest("\0".join(digests).encode())


def load_hub(name: str, subset: str | None, revision: str | None, split: str) -> ArrowRows:
    """Load one split of a hub dataset. Raises DataError if it cannot be reached or does not exist."""
    hint = f" There is no local file or folder {name} either. If you meant a local path, write ./ before it."
    with _quiet(), asked_once(), data_errors(name, prefix="cannot be loaded from the Hugging Face hub: ", hint=hint):
        table = datasets.load_dataset(name, name=subset, split=split, revision=revision)
    # The library's fingerprint covers the resolved revision and the builder's settings.
    assert isinstance(table, datasets.Dataset), type(table)
    identity = "\0".join((name, subset or "", revision or "", split, table._fingerprint))
    return ArrowRows(table, name, functools.partial(xxhash.xxh3_128_hexdigest, identity.encode()))


def without_padding(value: Any) -> Any:
    """Remove keys whose value is null, because Arrow gives every object the keys of all objects in the column."""
    if isinstance(value, dict):
        return {key: without_padding(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [without_padding(item) for item in value]
    return value


def _csv_columns(path: Path) -> Features:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}:1: not valid CSV in UTF-8: {error}.") from error
    if not header:
        raise DataError(f"{path}: is empty.")
    return Features({name: Value("string") for name in header})


def _cache_folder() -> Path:
    folder = Path(HF_DATASETS_CACHE)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(existing, os.W_OK):
        return folder / "spurline"
    return private_folder(Path(tempfile.gettempdir(), f"spurline-datasets-{os.getuid()}"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars, because loading is a small part of starting a run."""
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not shown:
            datasets.enable_progress_bars()


@contextmanager
def data_errors(origin: str, prefix: str = "cannot be read: ", hint: str = "") -> Iterator[None]:
    """Turn errors of the loading libraries into a DataError with `origin`, `prefix`, the error's text and `hint`."""
    try:
        yield
    except (DatasetsError, pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, DatasetsError) and error.__cause__ else error
        if "corresponds to no data" in str(cause):
            raise DataError(f"{origin}: is empty; it has no rows.") from error
        raise DataError(f"{origin}: {prefix}{' '.join(str(cause).split()).rstrip('.')}.{hint}") from error
