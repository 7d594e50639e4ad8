"""Identify the content of files by their size and XXH3-128 digest, which detect accidental damage but not forgery."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from spurline.errors import DamagedCheckpointError


@dataclass(frozen=True)
class FileDigest:
    """Size of a file, and the XXH3-128 digest of its content in hexadecimal digits."""

    num_bytes: int
    xxh3: str

    @classmethod
    def of(cls, content: bytes) -> Self:
        return cls(len(content), xxhash.xxh3_128(content).hexdigest())


class HashedFile:
    """A new file that is hashed while it is written.

    Use it as a context manager. On exit it forces the file to disk, unless the block raised an error. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._digest = xxhash.xxh3_128()
        self._num_bytes = 0
        self._file = path.open("xb")

    def write(self, block: bytes | memoryview) -> None:
        """Add bytes at the end. A memoryview must be contiguous, with items of one byte."""
        self._digest.update(block)
        self._num_bytes += len(block)
        self._file.write(block)

    @property
    def digest(self) -> FileDigest:
        """Return the digest of the bytes written so far."""
        return FileDigest(self._num_bytes, self._digest.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Close the file even if the last bytes cannot be written.
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def digest_file(path: Path, *, sync: bool = False) -> FileDigest:
    """Return the digest of a file. With `sync`, also force the file to disk. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return FileDigest(path.stat().st_size, digest.hexdigest())


def verify_files(folder: Path, digests: Mapping[str, FileDigest], only_sizes: Collection[str] = ()) -> None:
    """Compare files with their digests, but compare only the size of files in `only_sizes`.

    Raises DamagedCheckpointError naming the first file that differs.
    """
    for name, expected in digests.items():
        file = folder / name
        try:
            size = file.stat().st_size
            if size != expected.num_bytes:
                raise DamagedCheckpointError(f"{file} is damaged: it has {size} bytes instead of {expected.num_bytes}.")
            if name not in only_sizes and digest_file(file) != expected:
                raise DamagedCheckpointError(f"{file} is damaged: its content has changed.")
        except OSError as error:
            raise DamagedCheckpointError(f"{file} is missing or unreadable ({error}).") from error
