"""Stream tokenized samples into the files of a new cache entry.

Place on the way: tokenization -> CacheWriter (a SampleSink) -> entry. Keeps no samples in memory; digests are made
while the bytes pass by. Where the entry ends up is for the folder to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from spurline.data.token_store import SampleBlock, Tokenized, TokenStore, summarize
from spurline.errors import DataError
from spurline.files import sync_file
from spurline_collation_fast.cache.entry import ARRAYS, CacheKey, Manifest, array_path, map_array

if TYPE_CHECKING:
    from spurline_text.tokenization import Findings


class CacheWriter:
    """Writes one entry into `folder`; `publish` puts the finished folder into place and opens it there.

    Raises DataError when the disk is full or fails; the caller removes the folder.
    """

    def __init__(self, folder: Path, key: CacheKey, publish: Callable[[], Tokenized]) -> None:
        self.folder, self._key, self._publish = folder, key, publish
        self._samples = self._tokens = 0
        with disk_errors(folder.parent):
            self._files = {name: _ArrayFile(array_path(folder, name)) for name in ARRAYS}
            self._append("offsets", np.zeros(1))

    def extend(self, block: SampleBlock) -> None:
        """Append the samples of a block."""
        with disk_errors(self.folder.parent):
            self._append("tokens", block.tokens)
            self._append("loss_mask", block.loss_mask)
            self._append("offsets", self._tokens + np.cumsum(block.lengths))
            self._append("source", np.full(len(block.rows), block.source))
            self._append("row", block.rows)
        self._tokens += len(block.tokens)
        self._samples += len(block.rows)

    def build(self) -> TokenStore:
        """Return everything appended, on disk but not yet in the cache. Nothing can be appended afterwards."""
        with disk_errors(self.folder.parent):
            self.close()
            return TokenStore(**{name: map_array(self.folder, name) for name in ARRAYS}, labels=self._key.labels)

    def commit(self, findings: Findings) -> Tokenized:
        """Put the entry into the cache and open it, or another writer's that was there first."""
        store, found = self.build(), vars(findings)
        summary = summarize(Tokenized(store, **found))
        with disk_errors(self.folder.parent):
            for name in ARRAYS:
                sync_file(array_path(self.folder, name))
            Manifest(
                key=self._key.digest,
                parts=self._key.parts,
                created=datetime.now(UTC).isoformat(),
                labels=self._key.labels,
                sizes=store.sizes(),
                samples=self._samples,
                tokens=self._tokens,
                digests={name: file.digest.hexdigest() for name, file in self._files.items()},
                findings=found,
                summary=summary,
            ).write(self.folder)
            return self._publish()

    def close(self) -> None:
        """Close the files; calling it again does nothing."""
        for file in self._files.values():
            file.file.close()

    def _append(self, array: str, values: NDArray[Any]) -> None:
        self._files[array].append(np.ascontiguousarray(values, dtype=ARRAYS[array]))


class _ArrayFile:
    """A file that grows, with a digest of all of it."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: after a failed write there is nothing left that closing would try to write again.
        self.file = path.open("xb", buffering=0)
        self.digest = xxhash.xxh3_128()

    def append(self, values: NDArray[Any]) -> None:
        content = values.view(np.uint8).data if values.size else memoryview(b"")
        self.digest.update(content)
        while content:
            # A nearly full disk takes a part and refuses the rest.
            content = content[self.file.write(content) or 0 :]


@contextmanager
def disk_errors(cache_folder: Path) -> Iterator[None]:
    """Turn a failure to write into a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{cache_folder}: the token cache cannot be written: {error.strerror or error}. Set "
            "tokenization.cache_dir to a folder on another disk, or tokenization.disable_cache: true. "
            "`spurline cache prune` frees space."
        ) from error
