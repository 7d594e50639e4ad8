"""Dataset `hf`: local files and folders, or a name on the Hugging Face hub, with split strings.

Data flow: config -> files (local_files) and their rows (json_rows, arrow_rows) -> the rows of the split. Split
strings such as `train`, `train[:100]`, `train[10%:20%]` or `train[:50]+test` follow the grammar and rounding of Hugging
Face `datasets`, for local files too. Importing `datasets` takes a second, so only the functions that need it import it.
A run on JSON lines does not import it.
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from spurline.errors import DataError, listing, suggestion
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.json_rows import JsonArray, JsonLines, open_json
from spurline_text.datasets.local_files import digest_of_file, find_files, looks_local

if TYPE_CHECKING:
    from spurline_text.datasets.arrow_rows import ArrowRows

Found = TypeVar("Found")


class LocalFile:
    """The rows of a local file, which is opened when rows are needed. A pickled copy opens the file again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._suffix = path.suffix.lower()

    @functools.cached_property
    def rows(self) -> JsonLines | JsonArray | ArrowRows:
        """Open the file, and return its rows. Raises DataError if it cannot be read."""
        with self._readable():
            if self._suffix == ".jsonl":
                return JsonLines(self._path)
            if self._suffix == ".json":
                return open_json(self._path)
            from spurline_text.datasets.arrow_rows import load_file

            return load_file(self._path)

    @property
    def digest(self) -> str:
        """Return a hash of the file's current content, so that a change during reading is noticed."""
        with self._readable():
            return digest_of_file(self._path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self.rows[row]

    def location(self, row: int) -> str:
        return self.rows.location(row)

    def check(self, rows: range) -> None:
        """Raise DataError for the first of these rows that is not a JSON object. Only JSON files are checked."""
        if self._suffix in (".jsonl", ".json"):
            for row in rows:
                self.rows[row]

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self._path,)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror or error}.") from error


class HfDataset:
    """Rows of local files, of a saved dataset or of a hub dataset. A pickled copy contains no rows.

    The constructor finds the local files. They are loaded when a row or the number of rows is needed. If the split
    takes all rows, `fingerprint` hashes the files without loading them.
    """

    def __init__(self, config: HfDatasetConfig, *, registry: object = None) -> None:
        self._config = config
        self._path = config.path
        self._split = Split(config.split, config.path)
        self._files = _files_of_splits(config, self._split.names)
        self.label = config.label or default_label(config.path)

    @functools.cached_property
    def _chosen(self) -> list[tuple[str, range]]:
        return self._split.resolve({name: sum(map(len, files)) for name, files in self._files.items()})

    @functools.cached_property
    def _segments(self) -> list[tuple[LocalFile | ArrowRows, range]]:
        segments: list[tuple[LocalFile | ArrowRows, range]] = []
        for name, rows in self._chosen:
            begin = 0
            for file in self._files[name]:
                inside = range(max(rows.start - begin, 0), min(rows.stop - begin, len(file)))
                if len(inside):
                    segments.append((file, inside))
                begin += len(file)
        if not segments:
            found = ", ".join(str(sum(map(len, files))) for files in self._files.values())
            raise DataError(f"{self._path}: split {self._config.split!r} is empty; the data has {found} rows.")
        return segments

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(rows) for _, rows in self._segments))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        file, place = self._find(row)
        return {**file[place], **self._config.constants} if self._config.constants else file[place]

    def location(self, row: int) -> str:
        """Return `train.jsonl:12`, or `train.parquet row 11` (counted from 0) for files without lines."""
        file, place = self._find(row)
        return file.location(place)

    def fingerprint(self) -> str:
        """Return a hash of the files' content and of the rows that `split` chooses. Names of files do not matter."""
        digest = xxhash.xxh3_128()
        # Rows need to be counted only if the split leaves some out.
        whole = [(name, None) for name in self._files]
        for name, rows in whole if self._split.takes_all else self._chosen:
            takes_all = rows is None or len(rows) == sum(map(len, self._files[name]))
            which = "all" if takes_all or rows is None else f"{rows.start}:{rows.stop}"
            digest.update("\0".join((*(file.digest for file in self._files[name]), which, "")).encode())
        if self._config.constants:
            digest.update(json.dumps(self._config.constants, sort_keys=True).encode())
        return digest.hexdigest()

    def check(self) -> None:
        """Raise DataError if there are no rows, or if a JSON row cannot be read and `on_bad_row` is `error`."""
        for file, rows in self._segments:
            if isinstance(file, LocalFile) and self._config.on_bad_row == "error":
                file.check(rows)

    def _find(self, row: int) -> tuple[LocalFile | ArrowRows, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {self._path}, which has {len(self)} rows")
        index = bisect_right(self._ends, row)
        file, rows = self._segments[index]
        return file, rows[row - (self._ends[index] - len(rows))]


def _files_of_splits(config: HfDatasetConfig, names: Sequence[str]) -> dict[str, Sequence[LocalFile | ArrowRows]]:
    path = config.path
    if not looks_local(path):
        from spurline_text.datasets.arrow_rows import load_hub

        return {name: [load_hub(path, config.subset, config.revision, name)] for name in names}
    refuse_hub_settings(config)
    splits: Mapping[str, Sequence[LocalFile | ArrowRows]]
    local = Path(path).expanduser()
    # `save_to_disk` writes one of these files.
    if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
        from spurline_text.datasets.arrow_rows import load_saved

        splits = {name: [table] for name, table in load_saved(local).items()}
    else:
        splits = {name: [LocalFile(file) for file in files] for name, files in find_files(path).items()}
    return {name: of_split(splits, name, path) for name in names}


def refuse_hub_settings(config: HfDatasetConfig) -> None:
    """Raise DataError for settings that only hub datasets have."""
    for setting in ("subset", "revision"):
        if getattr(config, setting) is not None:
            raise DataError(f"{config.path}: {setting} is for hub datasets, but this path is local. Remove {setting}.")


def of_split(splits: Mapping[str, Found], name: str, path: str) -> Found:
    """Return the files of a split. Raises DataError if there is no such split."""
    if name not in splits:
        note = "" if len(splits) > 1 else " A stream reads a whole split. A file or glob has only the split `train`."
        raise DataError(f"{path}: has no split {name!r}.{suggestion(name, splits)} Splits: {listing(splits)}.{note}")
    return splits[name]


def default_label(path: str) -> str:
    """Return the hub name, the file name without suffix, or the folder name. A glob has the name of its folder."""
    if not looks_local(path):
        return path
    place = Path(path).expanduser()
    if place.is_file():
        return place.stem
    while "*" in place.name or "?" in place.name or "[" in place.name:
        place = place.parent
    return place.name or place.absolute().name


_NAME = re.compile(r"\w+(?:[.\-]\w+)*")


class Split:
    """A parsed split string.

    Attributes:
        names: Names of the splits whose rows it uses, without repetition.
        takes_all: Whether it uses all rows of these splits.
    """

    def __init__(self, spec: str, origin: str) -> None:
        """Parse `spec`. Raises DataError naming `origin` if it cannot be read."""
        self._spec = spec.strip()
        if _NAME.fullmatch(self._spec):
            self.names, self.takes_all = (self._spec,), True
            return
        from datasets import ReadInstruction

        try:
            self._instruction = ReadInstruction.from_spec(self._spec)
        except (ValueError, AssertionError) as error:
            why = str(error).rstrip(". ")
            raise DataError(
                f"{origin}: split {spec!r} cannot be read: {why}. Write it like train, train[:1000] or train[10%:20%]."
            ) from error
        parts = [part.strip() for part in spec.split("+")]
        self.names = tuple(dict.fromkeys(match.group() for part in parts if (match := _NAME.match(part))))
        self.takes_all = [*self.names] == parts

    def resolve(self, sizes: Mapping[str, int]) -> list[tuple[str, range]]:
        """Return the split name and the row range of each part. `sizes` is the number of rows of each split."""
        if _NAME.fullmatch(self._spec):
            return [(self._spec, range(sizes[self._spec]))]
        return [(part.splitname, range(part.from_, part.to)) for part in self._instruction.to_absolute(dict(sizes))]
