"""One entry of the token cache: a folder of flat arrays and a manifest.

Place on the way: cache entry -> TokenStore over mapped files -> views -> collator, as with a store in memory. A writer
renames a finished folder into place, so that an entry is whole or not there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline.data.token_store import Tokenized, TokenStore, fingerprint_of
from spurline.files import write_json

FORMAT_VERSION = 2
"""Part of every key: entries in an older layout are simply not found."""

ARRAYS: Mapping[str, np.dtype[Any]] = {
    "tokens": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "offsets": np.dtype("<i8"),
    "source": np.dtype("<i4"),
    "row": np.dtype("<i8"),
}
"""The arrays of a TokenStore, each in a file of its own."""

MANIFEST = "manifest.json"

_READ_WHOLE_BYTES = 64 << 20
"""Entries up to this size are compared with their digests when they are opened, which takes some milliseconds."""
_CHUNK_BYTES = 16 << 20


class DamagedEntry(Exception):  # noqa: N818 - a finding that makes the caller rebuild, not a failure of the run
    """An entry that cannot be used. The text says which file, and what is wrong with it."""


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

    key, parts: what the tokens were made of. created: ISO time in UTC. labels, sizes: name and samples of each dataset.
    digests: xxh3-128 of each array. findings: fields of `Findings`. summary: of `summarize`.
    """

    key: str
    parts: Mapping[str, Any]
    created: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    samples: int
    tokens: int
    digests: Mapping[str, str]
    findings: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the store."""
        return fingerprint_of(self.digests[name] for name in ("tokens", "loss_mask", "offsets", "source"))

    @property
    def num_bytes(self) -> dict[str, int]:
        """Size of the file of each array."""
        entries = {"tokens": self.tokens, "loss_mask": self.tokens, "offsets": self.samples + 1}
        return {name: entries.get(name, self.samples) * dtype.itemsize for name, dtype in ARRAYS.items()}

    def write(self, folder: Path) -> None:
        """Write it durably."""
        write_json(folder / MANIFEST, {"format": FORMAT_VERSION, **dataclasses.asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of an entry. Raises DamagedEntry unless it describes one, OSError."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            version = content.pop("format")
            manifest = cls(**{**content, "labels": tuple(content["labels"]), "sizes": tuple(content["sizes"])})
            fits = version == FORMAT_VERSION and manifest.key == folder.name and set(manifest.digests) == set(ARRAYS)
            fits = fits and len(manifest.labels) == len(manifest.sizes) and sum(manifest.sizes) == manifest.samples
            fits = fits and min(manifest.tokens, *manifest.sizes) >= 0
        except FileNotFoundError as error:
            raise DamagedEntry(f"{path} is missing") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedEntry(f"{path} does not describe an entry ({error})") from error
        if not fits:
            raise DamagedEntry(f"{path} does not describe this entry")
        return manifest


@dataclass(frozen=True)
class MappedTokenStore(TokenStore):
    """A store in memory-mapped files, whose fingerprint is known from the manifest."""

    known_fingerprint: str

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything training can see."""
        return self.known_fingerprint


def open_entry(folder: Path, labels: tuple[str, ...]) -> Tokenized:
    """Open an entry.

    The sizes of all files and the offsets are checked, and the content of a small entry; `check_content` reads any.

    Args:
        folder: The entry.
        labels: What its datasets are called now.

    Returns:
        The samples in mapped files; what is left out is said as when the tokens were made.

    Raises:
        DamagedEntry: If a file is missing, or is not what was written.
        OSError: If a file cannot be read now, which says nothing of it.
    """
    manifest = Manifest.read(folder)
    arrays = {name: _map_checked(folder, name, manifest.num_bytes[name]) for name in ARRAYS}
    _check_places(folder, manifest, arrays["offsets"], arrays["source"])
    if sum(manifest.num_bytes.values()) <= _READ_WHOLE_BYTES:
        check_content(folder)
    try:
        sources = dict(zip(labels, manifest.sizes, strict=True))
        store = MappedTokenStore(**arrays, labels=labels, known_fingerprint=manifest.fingerprint)
        return Tokenized(store, summary={**manifest.summary, "sources": sources}, **manifest.findings)
    except (TypeError, ValueError) as error:
        raise DamagedEntry(f"{folder / MANIFEST} does not describe an entry of this key ({error})") from error


def check_content(folder: Path) -> None:
    """Read an entry as a whole. Raises DamagedEntry unless every array is what was written, OSError."""
    manifest = Manifest.read(folder)
    for name in ARRAYS:
        digest = xxhash.xxh3_128()
        content = _map_checked(folder, name, manifest.num_bytes[name]).view(np.uint8)
        for start in range(0, len(content), _CHUNK_BYTES):
            digest.update(content[start : start + _CHUNK_BYTES].data)
        if digest.hexdigest() != manifest.digests[name]:
            raise DamagedEntry(f"{array_path(folder, name)} does not match its digest; it was changed")


def array_path(folder: Path, array: str) -> Path:
    """Return the file of one array of an entry."""
    return folder / f"{array}.bin"


def map_array(folder: Path, array: str) -> NDArray[Any]:
    """Map one array of an entry, read-only; a plain ndarray, so that compiled kernels take it."""
    with array_path(folder, array).open("rb") as file:
        # An empty file cannot be mapped.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.seek(0, 2) else b""
    return np.frombuffer(content, dtype=ARRAYS[array])


def canonical_json(value: Any) -> bytes:
    """Return one text for equal values, to be hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("utf-8")


def _map_checked(folder: Path, name: str, expected: int) -> NDArray[Any]:
    path = array_path(folder, name)
    try:
        size = path.stat().st_size
        if size != expected:
            raise DamagedEntry(f"{path} has {size:,} bytes instead of {expected:,}")
        return map_array(folder, name)
    except FileNotFoundError as error:
        raise DamagedEntry(f"{path} is missing") from error


def _check_places(folder: Path, manifest: Manifest, offsets: NDArray[np.int64], source: NDArray[np.int32]) -> None:
    """Raise DamagedEntry for offsets or sources that point beyond the entry: compiled loops go where they say."""
    if offsets[0] != 0 or offsets[-1] != manifest.tokens or (offsets[:-1] > offsets[1:]).any():
        raise DamagedEntry(f"{array_path(folder, 'offsets')} does not divide the tokens")
    if len(source) and (source.min() < 0 or source.max() >= len(manifest.labels)):
        raise DamagedEntry(f"{array_path(folder, 'source')} names datasets that do not exist")
