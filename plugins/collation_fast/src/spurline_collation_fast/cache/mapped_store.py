"""A TokenStore whose arrays are files: opening reads the manifest, touching samples checks their blocks.

Place on the way: cache entry -> MappedTokenStore -> views -> collator, as with a store in memory. Never hands out a
token that does not match its checksum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline.data.token_store import TokenStore, TokenView
from spurline.errors import DataError
from spurline_collation_fast.cache.block_guard import BlockGuard
from spurline_collation_fast.cache.layout import (
    ARRAYS,
    CHECKSUMS,
    MISSING,
    DamagedEntry,
    Manifest,
    array_path,
    map_array,
    num_blocks,
)

EAGER_BYTES = 64 * 1024 * 1024
"""Entries up to this size are checked as a whole when they are opened, which takes some milliseconds."""


@dataclass(frozen=True)
class MappedTokenStore(TokenStore):
    """A store in memory-mapped files; read it through `view`, which checks what it hands out.

    guard: what has been checked. known_sizes, known_fingerprint: from the manifest, so that opening reads no array.
    set_aside: moves the damaged entry away; None, or why it could not and what to do.
    """

    guard: BlockGuard
    known_sizes: tuple[int, ...]
    known_fingerprint: str
    set_aside: Callable[[], str | None]

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, int64 [N]; reads all offsets."""
        self._checked(lambda: self.guard.check_all("offsets"))
        return super().lengths()

    def sizes(self) -> tuple[int, ...]:
        """Number of samples from each dataset."""
        return self.known_sizes

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything training can see."""
        return self.known_fingerprint

    def view(self, indices: NDArray[np.int64]) -> TokenView:
        """The chosen samples, in that order. Raises DataError when a block they touch was changed on disk."""
        view = super().view(indices)
        if not self.guard.complete:
            self._checked(lambda: self.guard.check(view.indices))
        return view

    def _checked(self, check: Callable[[], None]) -> None:
        try:
            check()
        except DamagedEntry as damage:
            raise DataError(
                f"token cache: {damage}. The file was changed or the disk is failing; no batch was made of it. "
                f"{self.set_aside() or 'Run the same command again: the entry was set aside and is made anew.'}"
            ) from damage


def open_entry(
    folder: Path, labels: Sequence[str] | None, set_aside: Callable[[], str | None], *, eager: bool = True
) -> tuple[Manifest, MappedTokenStore]:
    """Open one entry; the cost depends on its size by 8 bytes per 64 KiB only.

    labels: what the datasets are called now; None keeps the names they had. eager: check small entries as a whole.
    Raises DamagedEntry when a file is missing, or the manifest, the size of a file, the table of checksums or, in a
    small entry, any block is not what was written; OSError when a file cannot be read now, which says nothing of it.
    """
    manifest = Manifest.read(folder)
    if manifest.key != folder.name:
        raise DamagedEntry(folder, f"holds the entry {manifest.key}; it was renamed")
    arrays = {name: _map_checked(folder, name, manifest) for name in ARRAYS}
    guard = BlockGuard(folder, arrays, _read_checksums(folder, manifest))
    if eager and sum(manifest.num_bytes(name) for name in ARRAYS) <= EAGER_BYTES:
        guard.check_all()
    store = MappedTokenStore(
        **arrays,
        labels=tuple(labels) if labels is not None else manifest.labels,
        guard=guard,
        known_sizes=manifest.sizes,
        known_fingerprint=manifest.fingerprint,
        set_aside=set_aside,
    )
    return manifest, store


def _map_checked(folder: Path, name: str, manifest: Manifest) -> NDArray[Any]:
    path, expected = array_path(folder, name), manifest.num_bytes(name)
    try:
        size = path.stat().st_size
        if size != expected:
            raise DamagedEntry(path, f"has {size:,} bytes instead of {expected:,}")
        return map_array(folder, name)
    except MISSING as error:
        raise DamagedEntry(path, "is missing") from error


def _read_checksums(folder: Path, manifest: Manifest) -> NDArray[np.uint64]:
    path = folder / CHECKSUMS
    try:
        content = path.read_bytes()
    except MISSING as error:
        raise DamagedEntry(path, "is missing") from error
    expected = sum(num_blocks(manifest.num_bytes(name)) for name in ARRAYS) * 8
    if len(content) != expected or xxhash.xxh3_128_hexdigest(content) != manifest.checksums:
        raise DamagedEntry(path, "does not match the manifest; it was cut or changed")
    return np.frombuffer(content, dtype="<u8")
