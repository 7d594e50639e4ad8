"""Stream tokenized samples into the files of a new cache entry.

Place on the way: tokenization -> CacheWriter (a SampleSink) -> entry. Keeps no samples in memory; checksums and the
fingerprint are made while the bytes pass by. Where the entry ends up is for the folder to say.
"""

from __future__ import annotations

import errno
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline.data.token_store import SampleBlock, Tokenized, TokenStore, fingerprint_of, summarize
from spurline.errors import DataError
from spurline.files import sync_file
from spurline_collation_fast.cache.layout import (
    ARRAYS,
    BLOCK_BYTES,
    CHECKSUMS,
    FINGERPRINTED,
    CacheKey,
    Manifest,
    array_path,
    map_array,
)

if TYPE_CHECKING:
    from spurline_text.tokenization import Findings

_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheWriter:
    """Writes one entry into `folder`; `publish` puts the finished folder into place and opens it there.

    What else is put into the folder has to be gone before `commit`. Raises DataError when the disk is full or fails;
    the caller removes the folder.
    """

    def __init__(self, folder: Path, key: CacheKey, publish: Callable[[], Tokenized]) -> None:
        self.folder, self._key, self._publish = folder, key, publish
        self._samples = self._tokens = 0
        with disk_errors(folder.parent):
            self._files = {name: _ArrayFile(array_path(folder, name)) for name in ARRAYS}
            self._append("offsets", np.zeros(1))

    def extend(self, block: SampleBlock) -> None:
        """Append the samples of a block."""
        with self._disk_errors():
            self._append("tokens", block.tokens)
            self._append("loss_mask", block.loss_mask)
            self._append("offsets", self._tokens + np.cumsum(block.lengths))
            self._append("source", np.full(len(block.rows), block.source))
            self._append("row", block.rows)
        self._tokens += len(block.tokens)
        self._samples += len(block.rows)

    def build(self) -> TokenStore:
        """The store of everything appended, on disk but not yet in the cache. Nothing can be appended afterwards."""
        with self._disk_errors():
            self.close()
            return TokenStore(**{name: map_array(self.folder, name) for name in ARRAYS}, labels=self._key.labels)

    def commit(self, findings: Findings) -> Tokenized:
        """Put the entry into the cache and open it, or another writer's that was there first."""
        store = self.build()
        found = vars(findings)
        summary = summarize(Tokenized(store, **found))
        checksums = b"".join(file.checksums() for file in self._files.values())
        with self._disk_errors():
            (self.folder / CHECKSUMS).write_bytes(checksums)
            for path in (*(array_path(self.folder, name) for name in ARRAYS), self.folder / CHECKSUMS):
                sync_file(path)
            Manifest(
                key=self._key.digest,
                parts=self._key.parts,
                created=datetime.now(UTC).isoformat(),
                writer=self.folder.name,
                labels=self._key.labels,
                sizes=store.sizes(),
                samples=self._samples,
                tokens=self._tokens,
                fingerprint=fingerprint_of(self._files[name].digest() for name in FINGERPRINTED),
                checksums=xxhash.xxh3_128_hexdigest(checksums),
                findings=found,
                summary=summary,
            ).write(self.folder)
            return self._publish()

    def close(self) -> None:
        """Close the files; calling it again does nothing."""
        for file in self._files.values():
            file.close()

    def _disk_errors(self) -> AbstractContextManager[None]:
        written = self._tokens * (ARRAYS["tokens"].itemsize + ARRAYS["loss_mask"].itemsize)
        return disk_errors(self.folder.parent, written)

    def _append(self, array: str, values: NDArray[Any]) -> None:
        self._files[array].append(np.ascontiguousarray(values, dtype=ARRAYS[array]))


class _ArrayFile:
    """A file that grows, with a digest of all of it and a checksum of each block."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: after a failed write there is nothing left that closing would try to write again.
        self._file = path.open("xb", buffering=0)
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._in_block = 0
        self._checksums = array("Q")

    def append(self, values: NDArray[Any]) -> None:
        if not values.size:
            return
        content = values.view(np.uint8).data
        self._whole.update(content)
        self._write(content)
        while content:
            piece = content[: BLOCK_BYTES - self._in_block]
            content = content[len(piece) :]
            self._block.update(piece)
            self._in_block += len(piece)
            if self._in_block == BLOCK_BYTES:
                self._end_block()

    def digest(self) -> str:
        return self._whole.hexdigest()

    def checksums(self) -> bytes:
        return np.array(self._checksums, dtype="<u8").tobytes()

    def close(self) -> None:
        if self._in_block:
            self._end_block()
        self._file.close()

    def _write(self, content: memoryview) -> None:
        while content:
            # A nearly full disk takes a part and refuses the rest.
            content = content[self._file.write(content) or 0 :]

    def _end_block(self) -> None:
        self._checksums.append(self._block.intdigest())
        self._block.reset()
        self._in_block = 0


@contextmanager
def disk_errors(cache_folder: Path, written: int = 0) -> Iterator[None]:
    """Turn a failure to write into a DataError that says what to do. written: bytes that fitted before."""
    try:
        yield
    except OSError as error:
        fix = "Set tokenization.cache_dir to a folder on another disk, or tokenization.disable_cache: true."
        reason = error.strerror or str(error)
        if error.errno not in _DISK_IS_FULL:
            raise DataError(f"{cache_folder}: the token cache cannot be written: {reason}. {fix}") from error
        free = shutil.disk_usage(cache_folder).free
        raise DataError(
            f"{cache_folder}: no space left for the token cache ({reason}). It needs more than the "
            f"{written / 2**20:,.1f} MiB written so far; {free / 2**20:,.1f} MiB are free now. "
            f"{fix} `spurline cache prune` frees space."
        ) from error
