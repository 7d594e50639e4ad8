"""Recognise the content of files: size and XXH3-128 digest, which find every accident, though no forgery."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from spurline.errors import DamagedCheckpointError


@dataclass(frozen=True)
class FileDigest:
    """Size of a file, and the XXH3-128 digest of its content in hexadecimal digits."""

    num_bytes: int
    xxh3: str


def digest_file(path: Path, *, sync: bool = False) -> FileDigest:
    """Read a whole file. sync: also force it to disk. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return FileDigest(path.stat().st_size, digest.hexdigest())


def verify_files(folder: Path, digests: Mapping[str, FileDigest]) -> None:
    """Raises DamagedCheckpointError naming a file that has not this size and content."""
    for name, expected in digests.items():
        try:
            found = digest_file(folder / name)
        except OSError as error:
            raise DamagedCheckpointError(f"{folder / name} is missing or unreadable ({error}).") from error
        if found.num_bytes != expected.num_bytes:
            raise DamagedCheckpointError(
                f"{folder / name} is damaged: it has {found.num_bytes} bytes instead of {expected.num_bytes}."
            )
        if found != expected:
            raise DamagedCheckpointError(f"{folder / name} is damaged: its content has changed.")
