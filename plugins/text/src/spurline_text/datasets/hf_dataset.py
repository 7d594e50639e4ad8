"""Dataset `hf`: local files and folders, or a name on the Hugging Face hub, with split strings.

Place on the way: config -> files (local_files) and their rows (json_rows, arrow_rows) -> the rows of the split. Split
strings such as `train`, `train[:100]`, `train[10%:20%]` or `train[:50]+test` have the grammar and the rounding of
Hugging Face `datasets`, for local files as for hub names. That library takes a second to import, and pyarrow a quarter
of one, so functions that need them import them; a run on a file of JSON lines needs neither.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from spurline.errors import DataError, listing, suggestion
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.json_rows import JsonLines, JsonRows, open_json, refuse_other_content
from spurline_text.datasets.local_files import (
    HoldsTable,
    LocalFile,
    LocalRows,
    RowFile,
    find_files,
    is_saved_dataset,
    looks_local,
)

if TYPE_CHECKING:
    import pyarrow


class _SplitRows:
    """The files of one split, end to end."""

    def __init__(self, files: Sequence[RowFile]) -> None:
        self._files = files

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(file) for file in self._files))

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
            opened = file.rows if isinstance(file, LocalFile) else file
            if isinstance(opened, JsonRows):
                begin = end - len(file)
                opened.check(range(max(rows.start - begin, 0), min(rows.stop - begin, len(file))))


class HfDataset:
    """Rows of local files, of a saved dataset or of a hub dataset. Can be pickled; rows are not copied along.

    Files are found at once and opened when a row, or their number, is asked for: `fingerprint` alone opens none.
    """

    def __init__(self, config: HfDatasetConfig) -> None:
        self._config = config
        self._path = config.path
        open_split = _split_opener(config)
        self._split = Split(config.split, config.path)
        self._opened = {name: open_split(name) for name in self._split.names}
        self.label = config.label or default_label(config.path)

    @functools.cached_property
    def _parts(self) -> list[tuple[_SplitRows, range]]:
        parts = self._split.resolve({name: len(rows) for name, rows in self._opened.items()})
        if not any(len(rows) for _, rows in parts):
            sizes = ", ".join(str(len(split)) for split in self._opened.values())
            raise DataError(f"{self._path}: split {self._config.split!r} is empty; the data has {sizes} rows.")
        return [(self._opened[name], rows) for name, rows in parts]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(rows) for _, rows in self._parts))

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
        for split, rows in self._chosen():
            digest.update("\0".join((*split.digests(), rows, "")).encode())
        return digest.hexdigest()

    def check(self) -> None:
        """Raise DataError when there is no row, or for the first that is unreadable unless `on_bad_row: skip`."""
        for split, rows in self._parts:
            if self._config.on_bad_row == "error":
                split.check(rows)

    def arrow(self, start: int, stop: int) -> pyarrow.Table | None:
        """Rows [start, stop) as an Arrow table, or None where they are not stored as one."""
        tables: list[pyarrow.Table] = []
        while start < stop:
            file, place = self._find(start)
            rows = file.rows if isinstance(file, LocalFile) else file
            if not isinstance(rows, HoldsTable):
                return None
            count = min(stop - start, len(rows) - place, self._end_of_part(start) - start)
            tables.append(rows.arrow(place, place + count))
            start += count
        if not tables:
            return None
        import pyarrow

        return pyarrow.concat_tables(tables)

    def _chosen(self) -> Iterator[tuple[_SplitRows, str]]:
        """Each part's split, and which rows of it as text; rows are counted only where the split leaves some out."""
        if self._split.takes_all:
            yield from ((rows, "all") for rows in self._opened.values())
            return
        for split, rows in self._parts:
            yield split, "all" if len(rows) == len(split) else f"{rows.start}:{rows.stop}"

    def _end_of_part(self, row: int) -> int:
        return self._ends[bisect_right(self._ends, row)]

    def _find(self, row: int) -> tuple[RowFile, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {self._path}, which has {len(self)} rows")
        index = bisect_right(self._ends, row)
        split, rows = self._parts[index]
        return split.find(rows[row - (self._ends[index] - len(rows))])


def _split_opener(config: HfDatasetConfig) -> Callable[[str], _SplitRows]:
    """Return a function that opens a split by its name: of a hub dataset, a `save_to_disk` folder, or files."""
    path = config.path
    if not looks_local(path):
        from spurline_text.datasets.arrow_rows import load_hub

        return lambda name: _SplitRows([load_hub(path, config.subset, config.revision, name)])
    for setting in ("subset", "revision"):
        if getattr(config, setting) is not None:
            raise DataError(f"{path}: {setting} is for hub datasets, but this path is local. Remove {setting}.")
    if is_saved_dataset(Path(path).expanduser()):
        from spurline_text.datasets.arrow_rows import load_saved

        splits = {name: [table] for name, table in load_saved(Path(path).expanduser()).items()}
    else:
        splits = {name: [LocalFile(file, _open_rows) for file in files] for name, files in find_files(path).items()}

    def open_split(name: str) -> _SplitRows:
        if name not in splits:
            raise _no_such_split(path, name, list(splits))
        return _SplitRows(splits[name])

    return open_split


def _open_rows(path: Path) -> LocalRows:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".json", ".csv"):
        refuse_other_content(path)
    if suffix == ".jsonl":
        return JsonLines(path)
    if suffix == ".json":
        return open_json(path)
    from spurline_text.datasets.arrow_rows import load_file

    return load_file(path)


def _no_such_split(path: str, name: str, known: list[str]) -> DataError:
    note = " A file or glob is one split, 'train'." if known == ["train"] and not Path(path).is_dir() else ""
    return DataError(f"{path}: has no split {name!r}.{suggestion(name, known)} Splits: {listing(known)}.{note}")


def default_label(path: str) -> str:
    """File stem, folder name, the folder of a glob, or the hub name."""
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
    """A parsed split string. names: the plain splits it takes rows from, each once."""

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
        self.names = tuple(dict.fromkeys(_split_name(part) for part in parts))
        # What each part takes is known without counting rows when it takes all.
        self.takes_all = len(self.names) == len(parts) and all(part == _split_name(part) for part in parts)

    def resolve(self, sizes: Mapping[str, int]) -> list[tuple[str, range]]:
        """Split name and rows of each part, given the number of rows of each split."""
        if _NAME.fullmatch(self._spec):
            return [(self._spec, range(sizes[self._spec]))]
        return [(part.splitname, range(part.from_, part.to)) for part in self._instruction.to_absolute(dict(sizes))]


def _split_name(part: str) -> str:
    match = _NAME.match(part)
    assert match is not None, f"{part!r} was accepted as a split but has no name"
    return match.group()
