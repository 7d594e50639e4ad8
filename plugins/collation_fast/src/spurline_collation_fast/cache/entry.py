"""One entry of the token cache: a folder of flat arrays and a manifest.

Place on the way: tokenization -> EntryWriter (a SampleSink) -> entry -> TokenStore over mapped files -> collator. A
finished folder is renamed into place, so that an entry is whole or not there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline.data.token_store import SampleBlock, Tokenized, TokenStore, fingerprint_of, summarize
from spurline.errors import DataError
from spurline.files import sync_file, write_json

if TYPE_CHECKING:
    from spurline_text.tokenization import Findings

FORMAT_VERSION = 2
"""A part of every key, so that entries in an older layout are not found."""

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


class DamagedEntry(Exception):  # noqa: N818 - a finding that makes the caller rebuild, not a failure of the run
    """An entry that cannot be used. The text says which file is wrong, and how."""


@dataclass(frozen=True)
class CacheKey:
    """The name of an entry.

    Attributes:
        digest: Hex digits, the name of the entry's folder.
        parts: Everything that the tokens depend on, readable.
        labels: Names of the datasets now. They are not in the digest: a renamed file holds the same tokens.
    """

    digest: str
    parts: Mapping[str, Any]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The facts of an entry that are known without reading its arrays.

    Attributes:
        key, parts, labels: As in CacheKey.
        created: ISO time in UTC.
        sizes: Samples of each dataset.
        tokens: Tokens of all samples.
        digests: xxh3-128 of each array.
        findings: Fields of `Findings`.
        summary: As `summarize` returns it.
    """

    key: str
    parts: Mapping[str, Any]
    labels: tuple[str, ...]
    created: str
    sizes: tuple[int, ...]
    tokens: int
    digests: Mapping[str, str]
    findings: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def num_bytes(self) -> dict[str, int]:
        """Return the size of the file of each array."""
        samples = sum(self.sizes)
        entries = {"tokens": self.tokens, "loss_mask": self.tokens, "offsets": samples + 1}
        return {name: entries.get(name, samples) * dtype.itemsize for name, dtype in ARRAYS.items()}

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of an entry. Raises DamagedEntry if none fits, OSError if it cannot be read now."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            version = content.pop("format")
            manifest = cls(**{**content, "labels": tuple(content["labels"]), "sizes": tuple(content["sizes"])})
            fits = version == FORMAT_VERSION and manifest.key == folder.name and set(manifest.digests) == set(ARRAYS)
            fits = fits and len(manifest.labels) == len(manifest.sizes) and min(manifest.tokens, *manifest.sizes) >= 0
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
        return self.known_fingerprint


def open_entry(folder: Path, labels: tuple[str, ...] | None = None, *, whole: bool = False) -> Tokenized:
    """Open an entry.

    Args:
        folder: The entry.
        labels: Names of its datasets now; None takes the labels in the manifest.
        whole: Whether to compare the content of a large entry too, which reads all of it.

    Returns:
        The samples in mapped files, with the counts from when the tokens were made.

    Raises:
        DamagedEntry: If a file is missing or has another size or content, or if the offsets do not divide the tokens.
        OSError: If a file cannot be read now. The entry may be whole all the same.
    """
    manifest = Manifest.read(folder)
    arrays = {name: _map_checked(folder, name, manifest.num_bytes[name]) for name in ARRAYS}
    _check_places(folder, manifest, arrays["offsets"], arrays["source"])
    if whole or sum(manifest.num_bytes.values()) <= _READ_WHOLE_BYTES:
        for name, array in arrays.items():
            if xxhash.xxh3_128_hexdigest(array.view(np.uint8).data) != manifest.digests[name]:
                raise DamagedEntry(f"{array_path(folder, name)} does not match its digest; it was changed")
    labels = manifest.labels if labels is None else labels
    fingerprint = fingerprint_of(manifest.digests[name] for name in ("tokens", "loss_mask", "offsets", "source"))
    try:
        sources = dict(zip(labels, manifest.sizes, strict=True))
        store = MappedTokenStore(**arrays, labels=labels, known_fingerprint=fingerprint)
        return Tokenized(store, summary={**manifest.summary, "sources": sources}, **manifest.findings)
    except (TypeError, ValueError) as error:
        raise DamagedEntry(f"{folder / MANIFEST} does not describe an entry of this key ({error})") from error


def array_path(folder: Path, array: str) -> Path:
    return folder / f"{array}.bin"


def _map_array(folder: Path, array: str) -> NDArray[Any]:
    """Map one array of an entry, read-only; a plain ndarray, so that compiled kernels take it."""
    with array_path(folder, array).open("rb") as file:
        # An empty file cannot be mapped.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.seek(0, 2) else b""
    return np.frombuffer(content, dtype=ARRAYS[array])


def _map_checked(folder: Path, name: str, expected: int) -> NDArray[Any]:
    path = array_path(folder, name)
    try:
        size = path.stat().st_size
        if size != expected:
            raise DamagedEntry(f"{path} has {size:,} bytes instead of {expected:,}")
        return _map_array(folder, name)
    except FileNotFoundError as error:
        raise DamagedEntry(f"{path} is missing") from error


def _check_places(folder: Path, manifest: Manifest, offsets: NDArray[np.int64], source: NDArray[np.int32]) -> None:
    """Raise DamagedEntry for offsets or sources that point beyond the entry: compiled loops go where they say."""
    if offsets[0] != 0 or offsets[-1] != manifest.tokens or (offsets[:-1] > offsets[1:]).any():
        raise DamagedEntry(f"{array_path(folder, 'offsets')} does not divide the tokens")
    if len(source) and (source.min() < 0 or source.max() >= len(manifest.labels)):
        raise DamagedEntry(f"{array_path(folder, 'source')} names datasets that do not exist")


class EntryWriter:
    """Streams samples into the files of a new entry, and makes their digests while the bytes pass by.

    Its methods raise DataError when the disk is full or fails; the caller removes the folder.
    """

    def __init__(self, folder: Path, key: CacheKey) -> None:
        self.folder, self._key = folder, key
        self._tokens = 0
        self._digests = {name: xxhash.xxh3_128() for name in ARRAYS}
        with disk_errors(folder.parent):
            # Unbuffered: after a failed write there is nothing left that closing would try to write again.
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
        """Return everything appended, on disk but not yet in the cache. Nothing can be appended afterwards."""
        with disk_errors(self.folder.parent):
            self.close()
            return TokenStore(**{name: _map_array(self.folder, name) for name in ARRAYS}, labels=self._key.labels)

    def finish(self, findings: Findings) -> None:
        """Write the manifest, and force everything to disk."""
        store = self.build()
        summary = summarize(Tokenized(store, **vars(findings)))
        with disk_errors(self.folder.parent):
            for name in ARRAYS:
                sync_file(array_path(self.folder, name))
            manifest = Manifest(
                key=self._key.digest,
                parts=self._key.parts,
                labels=self._key.labels,
                created=datetime.now(UTC).isoformat(),
                sizes=store.sizes(),
                tokens=self._tokens,
                digests={name: digest.hexdigest() for name, digest in self._digests.items()},
                findings=vars(findings),
                summary=summary,
            )
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
            # A nearly full disk takes a part and refuses the rest.
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
