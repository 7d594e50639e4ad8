"""What one cache entry looks like on disk: a folder of flat arrays, a table of checksums, and a manifest.

The manifest is written last; an entry without a readable one does not exist. Layout only: `writer` fills it,
`mapped_store` reads it.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline.files import write_json

FORMAT_VERSION = 1
"""Part of every key: entries in an older layout are simply not found."""

BLOCK_BYTES = 64 * 1024
"""Bytes under one checksum; the last block of a file may be shorter."""

ARRAYS: Mapping[str, np.dtype[Any]] = {
    "tokens": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "offsets": np.dtype("<i8"),
    "source": np.dtype("<i4"),
    "row": np.dtype("<i8"),
}
"""The arrays of a TokenStore, each in a file of its own, in the order of the checksum table."""

FINGERPRINTED = ("tokens", "loss_mask", "offsets", "source")
"""The arrays whose digests make the store's fingerprint, in the order `fingerprint_of` wants."""

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.bin"
"""xxh3-64 of each block, uint64, file after file in the order of ARRAYS."""


MISSING = (FileNotFoundError, NotADirectoryError)
"""A file that is not there is damage; any other failure to read says nothing about what is on the disk."""


class DamagedEntry(Exception):  # noqa: N818 - a finding that makes the caller rebuild, not a failure of the run
    """An entry that cannot be trusted. path: the file; reason: what is wrong with it."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} {reason}")


@dataclass(frozen=True)
class CacheKey:
    """Name of an entry.

    digest: hex, the entry's folder name. parts: what it was made of, readable. labels: what the datasets are called
    now; not part of the digest, since a renamed file holds the same tokens.
    """

    digest: str
    parts: Mapping[str, Any]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about an entry that is known without reading its arrays.

    key, parts: what the tokens were made of. created: ISO time in UTC. writer: host, process and a random part.
    labels, sizes: name and samples of each dataset. fingerprint: of the store. checksums: digest of the table.
    findings: fields of `Findings`. summary: of `summarize`.
    """

    key: str
    parts: Mapping[str, Any]
    created: str
    writer: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    samples: int
    tokens: int
    fingerprint: str
    checksums: str
    findings: Mapping[str, Any]
    summary: Mapping[str, Any]

    def num_bytes(self, array: str) -> int:
        """Size of the file of one array."""
        entries = {"tokens": self.tokens, "loss_mask": self.tokens, "offsets": self.samples + 1}
        return entries.get(array, self.samples) * ARRAYS[array].itemsize

    def write(self, folder: Path) -> None:
        """Write it durably, with a digest over itself."""
        content = {"format": FORMAT_VERSION, **dataclasses.asdict(self)}
        write_json(folder / MANIFEST, {**content, "digest": _digest(content)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of an entry. Raises DamagedEntry unless it is exactly what was written, OSError."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
        except MISSING as error:
            raise DamagedEntry(path, "is missing") from error
        except (ValueError, RecursionError) as error:
            raise DamagedEntry(path, "is not valid JSON; it was cut or changed") from error
        if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):
            raise DamagedEntry(path, "does not match its own digest; it was changed")
        if content.pop("format") != FORMAT_VERSION:
            raise DamagedEntry(path, "is of another version of the cache")
        try:
            manifest = cls(**{**content, "labels": tuple(content["labels"]), "sizes": tuple(content["sizes"])})
            numbers = (manifest.samples, manifest.tokens, *manifest.sizes)
            fits = len(manifest.labels) == len(manifest.sizes) and sum(manifest.sizes) == manifest.samples
            fits = fits and all(isinstance(number, int) and number >= 0 for number in numbers)
        except (TypeError, KeyError) as error:
            raise DamagedEntry(path, f"does not describe an entry ({error})") from error
        if not fits:
            raise DamagedEntry(path, "does not describe an entry (its numbers of samples do not fit)")
        return manifest


def array_path(folder: Path, array: str) -> Path:
    """File of one array of an entry."""
    return folder / f"{array}.bin"


def num_blocks(num_bytes: int) -> int:
    """Blocks, hence checksums, of a file of this size."""
    return -(-num_bytes // BLOCK_BYTES)


def map_array(folder: Path, array: str) -> NDArray[Any]:
    """One array of an entry, memory-mapped and read-only; a plain ndarray, so that compiled kernels take it."""
    with array_path(folder, array).open("rb") as file:
        # An empty file cannot be mapped.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.seek(0, 2) else b""
    return np.frombuffer(content, dtype=ARRAYS[array])


def canonical_json(value: Any) -> bytes:
    """One text for equal values, to be hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("utf-8")


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(content))
