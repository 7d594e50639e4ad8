"""Check the blocks of an entry against their checksums, each on first touch and never again.

In: memory-mapped arrays, the table of checksums, the samples about to be read. Out: nothing, or DamagedEntry. Without
locks: two threads that meet at one block both check it, which costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline_collation_fast.cache.layout import ARRAYS, BLOCK_BYTES, DamagedEntry, array_path, num_blocks


class BlockGuard:
    """Knows which blocks of an entry have been checked.

    arrays: by name, as in ARRAYS. checksums: uint64, of all blocks, file after file.
    """

    def __init__(self, folder: Path, arrays: Mapping[str, NDArray[Any]], checksums: NDArray[np.uint64]) -> None:
        ends = np.cumsum([num_blocks(arrays[name].nbytes) for name in ARRAYS])
        expected = dict(zip(ARRAYS, np.split(checksums, ends[:-1]), strict=True))
        self._files = {name: _File(array_path(folder, name), arrays[name], expected[name]) for name in ARRAYS}
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
    """The blocks of one array's file. checked: bool per block."""

    def __init__(self, path: Path, array: NDArray[Any], checksums: NDArray[np.uint64]) -> None:
        self._path = path
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
        self.checked[blocks] = True


def _each(begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """All whole numbers of the ranges begin[i]..end[i], both ends included, one range after another."""
    counts = end - begin + 1
    ends = np.cumsum(counts)
    return np.repeat(begin - (ends - counts), counts) + np.arange(ends[-1])
