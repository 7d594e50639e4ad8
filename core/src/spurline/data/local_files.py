"""Find the files that a local dataset path stands for.

In: a file, folder or glob. Out: split name -> files, sorted. Decides what is local at all: such a path never goes to
the network. Reads no rows.
"""

from __future__ import annotations

import difflib
import glob
from pathlib import Path

from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

from spurline.errors import DataError, listing

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".csv")
"""Files that can be read, by the end of their name."""

_OTHER_DATA_SUFFIXES = (
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
        or Path(path).suffix.lower() in SUFFIXES + _OTHER_DATA_SUFFIXES
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
