"""Find the files of a local dataset path. A path that looks local is never looked up on the hub."""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path

import xxhash

from spurline.errors import DataError, listing, suggestion

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".csv")
"""Suffixes of files that can be read."""

_OTHER_SUFFIXES = (".ndjson", ".tsv", ".txt", ".gz", ".zst", ".zip", ".xz", ".bz2", ".tar", ".xlsx", ".pkl", ".yaml")


def looks_local(path: str) -> bool:
    """Return whether a dataset path is local: it exists, or looks like the path of a file or folder."""
    return (
        path.startswith((".", "/", "~", "\\"))
        or Path(path).suffix.lower() in SUFFIXES + _OTHER_SUFFIXES
        or glob.has_magic(path)
        or path.count("/") > 1
        or Path(path).exists()
    )


def find_files(path: str) -> dict[str, list[Path]]:
    """Return the files of each split. A file or glob has the split `train`. The files of each split are sorted."""
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
            raise DataError(f"{path}: matches no file ending in {', '.join(SUFFIXES)}.{neighbours(local)}")
        return {"train": files}
    if local.exists():
        raise DataError(f"{path}: is not a regular file. Write its rows into a file, and give its path.")
    raise DataError(f"{path}: no such file or folder.{neighbours(local)}")


def _files_of_folder(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split. Words in file names determine the split, as in Hugging Face `datasets`."""
    # This import takes a second. A run on JSON files does not need it.
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


def neighbours(missing: Path) -> str:
    """Suggest a name similar to the missing path, and list folders and data files in its nearest existing parent."""
    folder, name = missing.parent, missing.name
    while not folder.is_dir():
        folder, name = folder.parent, folder.name
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix.lower() in SUFFIXES]
    return f"{suggestion(name, names)} {folder.absolute()} contains: {listing(names)}."


def digest_of_file(path: Path) -> str:
    """Return the xxh3-128 hex digest of the content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
