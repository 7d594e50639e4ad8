"""Dataset `hf`: local files and folders, or a name on the Hugging Face hub, with split strings.

Place on the way: config -> files (local_files) and their rows (json_rows, arrow_rows) -> the rows of the split. Split
strings such as `train`, `train[:100]`, `train[10%:20%]` or `train[:50]+test` have the grammar and the rounding of
Hugging Face `datasets`, for local files as for hub names. That library takes a second to import, so functions that need
it import it; a run on a file of JSON lines does not.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from spurline.errors import DataError, listing, suggestion
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.json_rows import JsonArray, JsonLines, open_json
from spurline_text.datasets.local_files import LocalFile, RowFile, Rows, find_files, is_saved_dataset, looks_local

Found = TypeVar("Found")


class HfDataset:
    """Rows of local files, of a saved dataset or of a hub dataset. Can be pickled; rows are not copied along.

    Files are found at once, and opened for the first row or the number of rows; `fingerprint` alone opens none.
    """

    def __init__(self, config: HfDatasetConfig) -> None:
        self._config = config
        self._path = config.path
        open_split = _split_opener(config)
        self._split = Split(config.split, config.path)
        self._files = {name: open_split(name) for name in self._split.names}
        self.label = config.label or default_label(config.path)

    @functools.cached_property
    def _chosen(self) -> list[tuple[str, range]]:
        return self._split.resolve({name: sum(map(len, files)) for name, files in self._files.items()})

    @functools.cached_property
    def _segments(self) -> list[tuple[RowFile, range]]:
        segments: list[tuple[RowFile, range]] = []
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
        return file[place]

    def location(self, row: int) -> str:
        """Return `train.jsonl:12`, or `train.parquet row 11` (counted from 0 in the file) where lines mean nothing."""
        file, place = self._find(row)
        return file.location(place)

    def fingerprint(self) -> str:
        """Hash the content of all files and the rows chosen by `split`; names and folders do not matter."""
        digest = xxhash.xxh3_128()
        # Rows are counted only if the split leaves some out.
        whole = [(name, None) for name in self._files]
        for name, rows in whole if self._split.takes_all else self._chosen:
            takes_all = rows is None or len(rows) == sum(map(len, self._files[name]))
            which = "all" if takes_all or rows is None else f"{rows.start}:{rows.stop}"
            digest.update("\0".join((*(file.digest for file in self._files[name]), which, "")).encode())
        return digest.hexdigest()

    def check(self) -> None:
        """Raise DataError if there is no row, or if a row is unreadable and not skipped by `on_bad_row: skip`."""
        for file, rows in self._segments:
            opened = file.rows if isinstance(file, LocalFile) else file
            if isinstance(opened, (JsonLines, JsonArray)) and self._config.on_bad_row == "error":
                opened.check(rows)

    def _find(self, row: int) -> tuple[RowFile, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {self._path}, which has {len(self)} rows")
        index = bisect_right(self._ends, row)
        file, rows = self._segments[index]
        return file, rows[row - (self._ends[index] - len(rows))]


def _split_opener(config: HfDatasetConfig) -> Callable[[str], Sequence[RowFile]]:
    path = config.path
    if not looks_local(path):
        from spurline_text.datasets.arrow_rows import load_hub

        return lambda name: [load_hub(path, config.subset, config.revision, name)]
    refuse_hub_settings(config)
    splits: Mapping[str, Sequence[RowFile]]
    if is_saved_dataset(Path(path).expanduser()):
        from spurline_text.datasets.arrow_rows import load_saved

        splits = {name: [table] for name, table in load_saved(Path(path).expanduser()).items()}
    else:
        splits = {name: [LocalFile(file, _open_rows) for file in files] for name, files in find_files(path).items()}
    return lambda name: of_split(splits, name, path)


def refuse_hub_settings(config: HfDatasetConfig) -> None:
    """Raise DataError for settings that a local path does not take."""
    for setting in ("subset", "revision"):
        if getattr(config, setting) is not None:
            raise DataError(f"{config.path}: {setting} is for hub datasets, but this path is local. Remove {setting}.")


def of_split(splits: Mapping[str, Found], name: str, path: str) -> Found:
    """Return the files of a split. Raises DataError if there is no such split."""
    if name not in splits:
        note = "" if len(splits) > 1 else " A stream takes a whole split, and a file or glob is one, `train`."
        raise DataError(f"{path}: has no split {name!r}.{suggestion(name, splits)} Splits: {listing(splits)}.{note}")
    return splits[name]


def _open_rows(path: Path) -> Rows:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return JsonLines(path)
    if suffix == ".json":
        return open_json(path)
    from spurline_text.datasets.arrow_rows import load_file

    return load_file(path)


def default_label(path: str) -> str:
    """Return the file stem, the folder name, the folder of a glob, or the hub name."""
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
        names: The plain splits that it takes rows from, each once.
        takes_all: Whether it takes all rows of each of them.
    """

    def __init__(self, spec: str, origin: str) -> None:
        """Raises DataError naming `origin` when the string cannot be read."""
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
        """Return split name and rows of each part, given the number of rows of each split."""
        if _NAME.fullmatch(self._spec):
            return [(self._spec, range(sizes[self._spec]))]
        return [(part.splitname, range(part.from_, part.to)) for part in self._instruction.to_absolute(dict(sizes))]
