"""A TokenStore whose arrays are files: opening reads the manifest, touching samples checks their blocks.

Place on the way: cache entry -> MappedTokenStore -> views -> collator, as with a store in memory. Never hands out a
token that does not match its checksum: each block is checked on first touch and never again. Without locks: two threads
that meet at one block both check it, which costs time and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline.data.token_store import TokenStore, TokenView
from spurline.errors import DataError
from spurline_collation_fast.cache.layout import (
    ARRAYS,
    BLOCK_BYTES,
    CHECKSUMS,
    MISSING,
    DamagedEntry,
    Manifest,
    array_path,
    map_array,
    num_blocks,
)


class BlockGuard:
    """Knows which blocks of an entry have been checked.

    arrays: by name, as in ARRAYS. checksums: uint64, of all blocks, file after file.
    """

    def __init__(
        self, folder: Path, arrays: Mapping[str, NDArray[Any]], checksums: NDArray[np.uint64], num_sources: int
    ) -> None:
        ends = np.cumsum([num_blocks(arrays[name].nbytes) for name in ARRAYS])
        expected = dict(zip(ARRAYS, np.split(checksums, ends[:-1]), strict=True))
        # Compiled loops go where these say. Checksums tell accidents from what was written, and no more than that.
        num_tokens = len(arrays["tokens"])
        possible = {
            "offsets": lambda values: values[0] >= 0 and values[-1] <= num_tokens and (values[:-1] <= values[1:]).all(),
            "source": lambda values: values.min() >= 0 and values.max() < num_sources,
        }
        self._files = {
            name: _File(array_path(folder, name), arrays[name], expected[name], possible.get(name)) for name in ARRAYS
        }
        self._offsets = arrays["offsets"]
        self.complete = self._is_complete()
        """Whether nothing is left to check."""

    def check(self, indices: NDArray[np.int64]) -> None:
        """Check what has not been checked yet of these samples: their entries in every array, and their tokens."""
        if self.complete or not len(indices):
            return
        # The offsets first: they say where the tokens are.
        found = self._files["offsets"].check(indices, indices + 1)
        found |= self._files["source"].check(indices, indices)
        found |= self._files["row"].check(indices, indices)
        starts, stops = self._offsets[indices], self._offsets[indices + 1]
        if not (starts < stops).all():
            filled = starts < stops
            starts, stops = starts[filled], stops[filled]
        found |= self._files["tokens"].check(starts, stops - 1)
        found |= self._files["loss_mask"].check(starts, stops - 1)
        if found:
            self.complete = self._is_complete()

    def check_all(self, *arrays: str) -> None:
        """Check every block of these arrays, of all by default."""
        for name in arrays or ARRAYS:
            self._files[name].check_all()
        self.complete = self._is_complete()

    def _is_complete(self) -> bool:
        return all(file.checked.all() for file in self._files.values())


class _File:
    """The blocks of one array's file. checked: bool per block.

    is_possible: whether entries that follow one another, those of a block and the next one, can be what was written.
    """

    def __init__(
        self,
        path: Path,
        array: NDArray[Any],
        checksums: NDArray[np.uint64],
        is_possible: Callable[[NDArray[Any]], bool] | None,
    ) -> None:
        self._path, self._array, self._is_possible = path, array, is_possible
        self._content = array.view(np.uint8).data
        # Entry number -> block number.
        self._shift = (BLOCK_BYTES // array.itemsize).bit_length() - 1
        self._checksums = checksums
        self.checked = np.zeros(len(checksums), dtype=bool)

    def check(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> bool:
        """Check the blocks that hold entries first[i] to last[i]; whether any had not been checked before."""
        begin, end = first >> self._shift, last >> self._shift
        # Few samples are longer than a block: both ends of each are usually all of it.
        blocks = np.concatenate((begin, end)) if (end - begin <= 1).all() else _each(begin, end)
        checked = self.checked[blocks]
        if checked.all():
            return False
        self._check_blocks(np.unique(blocks[~checked]))
        return True

    def check_all(self) -> None:
        """Check every block."""
        self._check_blocks(np.flatnonzero(~self.checked))

    def _check_blocks(self, blocks: NDArray[np.int64]) -> None:
        for block, expected in zip(blocks.tolist(), self._checksums[blocks].tolist(), strict=True):
            start = block * BLOCK_BYTES
            if xxhash.xxh3_64_intdigest(self._content[start : start + BLOCK_BYTES]) != expected:
                raise DamagedEntry(self._path, f"block {block} (from byte {start:,}) does not match its checksum")
            if self._is_possible is not None:
                first = block << self._shift
                if not self._is_possible(self._array[first : first + (1 << self._shift) + 1]):
                    raise DamagedEntry(
                        self._path, f"block {block} (from byte {start:,}) was not made by a tokenization"
                    )
        self.checked[blocks] = True


def _each(begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """All whole numbers of the ranges begin[i]..end[i], both ends included, one range after another."""
    counts = end - begin + 1
    ends = np.cumsum(counts)
    return np.repeat(begin - (ends - counts), counts) + np.arange(ends[-1])


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
    guard = BlockGuard(folder, arrays, _read_checksums(folder, manifest), len(manifest.labels))
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
