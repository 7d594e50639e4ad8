"""Write and open an entry of the token cache: a folder with flat arrays and a manifest.

Data flow: tokenization -> EntryWriter (a SampleSink) -> entry -> TokenStore over mapped files -> collator. The
cache renames a finished folder into place, so an entry is whole or absent.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline.data.token_store import SampleBlock, Tokenized, TokenStore, fingerprint_of, summarize
from spurline.errors import DataError
from spurline.files import sync_file, write_json

FORMAT_VERSION = 3
"""Version of the layout. Every key contains it, so entries in an older layout are never found."""

ARRAYS: Mapping[str, np.dtype[Any]] = {
    "tokens": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "offsets": np.dtype("<i8"),
    "source": np.dtype("<i4"),
    "row": np.dtype("<i8"),
}
"""The arrays of a TokenStore. Each has its own file."""

MANIFEST = "manifest.json"

_READ_WHOLE_BYTES = 64 << 20
"""Entries up to this size are compared with their digests when they are opened, which takes some milliseconds."""


class DamagedEntry(Exception):  # noqa: N818 - a finding that makes the caller rebuild, not a failure of the run
    """An entry that cannot be used. The text names the damaged file and the problem."""


@dataclass(frozen=True)
class CacheKey:
    """The name of an entry.

    Attributes:
        digest: Hex digits, the name of the entry's folder.
        parts: Everything that the tokens depend on, in readable form.
        labels: Current names of the datasets. The digest does not cover them: a renamed file has the same tokens.
    """

    digest: str
    parts: Mapping[str, Any]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of an entry, which can be read without its arrays.

    Attributes:
        key: Digest of the key, the name of the entry's folder.
        parts: Everything that the tokens depend on, for people to read.
        digests: xxh3-128 of each array.
        summary: Result of `summarize`, with the sizes of the datasets and the counts of rows without a sample.
    """

    key: str
    parts: Mapping[str, Any]
    digests: Mapping[str, str]
    summary: Mapping[str, Any]

    @property
    def num_bytes(self) -> dict[str, int]:
        """Return the size in bytes that the file of each array must have."""
        tokens, samples = self.summary["tokens"], sum(self.summary["sources"].values())
        entries = {"tokens": tokens, "loss_mask": tokens, "offsets": samples + 1}
        return {name: entries.get(name, samples) * dtype.itemsize for name, dtype in ARRAYS.items()}

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of an entry. Raises DamagedEntry if it is wrong, OSError if it cannot be read now."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            version = content.pop("format")
            manifest = cls(**content)
            fits = version == FORMAT_VERSION and manifest.key == folder.name and set(manifest.digests) == set(ARRAYS)
            fits = fits and min(manifest.num_bytes.values()) >= 0
        except FileNotFoundError as error:
            raise DamagedEntry(f"{path} is missing") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedEntry(f"{path} does not describe an entry ({error})") from error
        if not fits:
            raise DamagedEntry(f"{path} does not describe this entry")
        return manifest


def open_entry(folder: Path, labels: tuple[str, ...] | None = None, *, whole: bool = False) -> Tokenized:
    """Open an entry.

    Args:
        folder: The entry.
        labels: Current names of the entry's datasets. If None, the names in the manifest are used.
        whole: Whether to compare even a large entry with its digests. This reads the whole entry.

    Returns:
        The samples in memory-mapped files, and from the manifest, the counts of dropped and truncated rows.

    Raises:
        DamagedEntry: If a file is missing or has another size or content, or if the offsets do not divide the tokens.
        OSError: If a file cannot be read now. The entry may still be undamaged.
    """
    manifest = Manifest.read(folder)
    summary, num_bytes = manifest.summary, manifest.num_bytes
    arrays = {name: _map_array(folder, name, num_bytes[name]) for name in ARRAYS}
    _check_places(folder, summary, arrays["offsets"], arrays["source"])
    if whole or sum(num_bytes.values()) <= _READ_WHOLE_BYTES:
        for name, array in arrays.items():
            if xxhash.xxh3_128_hexdigest(array.view(np.uint8).data) != manifest.digests[name]:
                raise DamagedEntry(f"{array_path(folder, name)} does not match its digest; it was changed")
    labels = tuple(summary["sources"]) if labels is None else labels
    store = TokenStore(**arrays, labels=labels)
    # Set the cached property from the manifest. Otherwise reading it would hash all arrays.
    vars(store)["fingerprint"] = fingerprint_of(
        manifest.digests[name] for name in ("tokens", "loss_mask", "offsets", "source")
    )
    try:
        return Tokenized(
            store,
            dropped=summary["dropped"],
            truncated=summary["truncated"],
            examples=summary["dropped_examples"],
            ignored=summary["ignored"],
            summary={**summary, "sources": dict(zip(labels, summary["sources"].values(), strict=True))},
        )
    except (KeyError, ValueError) as error:
        raise DamagedEntry(f"{folder / MANIFEST} does not describe an entry of this key ({error})") from error


def array_path(folder: Path, array: str) -> Path:
    return folder / f"{array}.bin"


def _map_array(folder: Path, array: str, expected: int | None = None) -> NDArray[Any]:
    """Map one array of an entry, read-only, and check its size in bytes. Compiled kernels need a plain ndarray."""
    path = array_path(folder, array)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if expected is not None and size != expected:
                raise DamagedEntry(f"{path} has {size:,} bytes instead of {expected:,}")
            # An empty file cannot be mapped.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError as error:
        raise DamagedEntry(f"{path} is missing") from error
    return np.frombuffer(content, dtype=ARRAYS[array])


def _check_places(
    folder: Path, summary: Mapping[str, Any], offsets: NDArray[np.int64], source: NDArray[np.int32]
) -> None:
    """Raise DamagedEntry for wrong offsets or sources, because compiled loops would read memory outside the arrays."""
    if offsets[0] != 0 or offsets[-1] != summary["tokens"] or (offsets[:-1] > offsets[1:]).any():
        raise DamagedEntry(f"{array_path(folder, 'offsets')} does not divide the tokens")
    if len(source) and (source.min() < 0 or source.max() >= len(summary["sources"])):
        raise DamagedEntry(f"{array_path(folder, 'source')} names datasets that do not exist")


class EntryWriter:
    """Writes samples into the files of a new entry, and computes the digests of these files.

    Its methods raise DataError if the disk is full or fails. The caller then removes the folder.
    """

    def __init__(self, folder: Path, key: CacheKey) -> None:
        self.folder, self._key = folder, key
        self._tokens = 0
        self._digests = {name: xxhash.xxh3_128() for name in ARRAYS}
        with disk_errors(folder.parent):
            # The files are unbuffered, because closing a buffered file after a failed write would try to write again.
            self._files = {name: array_path(folder, name).open("xb", buffering=0) for name in ARRAYS}
            self._append("offsets", np.zeros(1))

    def extend(self, block: SampleBlock) -> None:
        with disk_errors(self.folder.parent):
            self._append("tokens", block.tokens)
            self._append("loss_mask", block.loss_mask)
            self._append("offsets", self._tokens + np.cumsum(block.lengths))
            self._append("source", np.full(len(block.rows), block.source))
            self._append("row", block.rows)
        self._tokens += len(block.tokens)

    def build(self) -> TokenStore:
        """Return all samples, which are on disk but not yet in the cache. No samples can be appended afterwards."""
        with disk_errors(self.folder.parent):
            self.close()
            return TokenStore(**{name: _map_array(self.folder, name) for name in ARRAYS}, labels=self._key.labels)

    def finish(self, tokenized: Tokenized) -> None:
        """Write the manifest of the samples that `build` returned, and force all files to disk."""
        digests = {name: digest.hexdigest() for name, digest in self._digests.items()}
        manifest = Manifest(self._key.digest, self._key.parts, digests, summarize(tokenized))
        with disk_errors(self.folder.parent):
            for name in ARRAYS:
                sync_file(array_path(self.folder, name))
            write_json(self.folder / MANIFEST, {"format": FORMAT_VERSION, **dataclasses.asdict(manifest)})

    def close(self) -> None:
        """Close the files; calling it again does nothing."""
        for file in self._files.values():
            file.close()

    def _append(self, array: str, values: NDArray[Any]) -> None:
        values = np.ascontiguousarray(values, dtype=ARRAYS[array])
        content = values.view(np.uint8).data if values.size else memoryview(b"")
        self._digests[array].update(content)
        while content:
            # If the disk is nearly full, only a part may be written. The next write then raises an error.
            content = content[self._files[array].write(content) or 0 :]


@contextmanager
def disk_errors(cache_folder: Path) -> Iterator[None]:
    """Turn a failure to write into a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{cache_folder}: the token cache cannot be written: {error.strerror or error}. Free space by "
            "`spurline cache prune`, set tokenization.cache_dir to another disk, or tokenization.disable_cache: true."
        ) from error
