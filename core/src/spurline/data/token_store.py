"""Tokenized samples as flat arrays: the form in which data waits to be batched.

Place on the way: tokenization -> TokenStore -> (indices of a step) TokenView -> collator. In memory here; a plugin may
back the same arrays by memory-mapped files, since nothing but numpy indexing is used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenStore:
    """Samples in file order, one after another in flat arrays.

    tokens: int32 [T]. loss_mask: uint8 [T], 1 where predicting that token is trained.
    offsets: int64 [N + 1]; sample i is tokens[offsets[i]:offsets[i + 1]].
    source: int32 [N], which dataset each sample is from. row: int64 [N], its row there.
    labels: name of each dataset, for uids and reports.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    source: NDArray[np.int32]
    row: NDArray[np.int64]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, int64 [N]."""
        return np.diff(self.offsets)

    def sizes(self) -> tuple[int, ...]:
        """Number of samples from each dataset, in the order of `labels`."""
        return tuple(np.bincount(self.source, minlength=len(self.labels)).tolist())

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything training can see: tokens, masks, offsets. A mapped store may know it already."""
        digest = xxhash.xxh3_128()
        for array in (self.tokens, self.loss_mask, self.offsets, self.source):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def uid(self, index: int) -> str:
        """Name of a sample for people: `LABEL:ROW`, the row counted from 0 in its dataset."""
        return f"{self.labels[int(self.source[index])]}:{int(self.row[index])}"

    def view(self, indices: NDArray[np.int64]) -> TokenView:
        """The chosen samples, in that order; no tokens are copied."""
        return TokenView(self, np.asarray(indices, dtype=np.int64))


@dataclass(frozen=True)
class TokenView:
    """Some samples of a store, in batch order. indices: int64 [n] into the store; repeats are allowed."""

    store: TokenStore
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each chosen sample, int64 [n]."""
        return self.store.offsets[self.indices + 1] - self.store.offsets[self.indices]

    def tokens(self, position: int) -> NDArray[np.int32]:
        """Token ids of the sample at this position of the view, int32 [length]; do not write to it."""
        start, stop = self._bounds(position)
        return self.store.tokens[start:stop]

    def loss_mask(self, position: int) -> NDArray[np.uint8]:
        """Loss mask of the sample at this position of the view, uint8 [length]; do not write to it."""
        start, stop = self._bounds(position)
        return self.store.loss_mask[start:stop]

    def uid(self, position: int) -> str:
        """Name of the sample at this position of the view."""
        return self.store.uid(int(self.indices[position]))

    def _bounds(self, position: int) -> tuple[int, int]:
        index = int(self.indices[position])
        return int(self.store.offsets[index]), int(self.store.offsets[index + 1])


class TokenStoreBuilder:
    """Collect samples one by one and freeze them into a TokenStore."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = tuple(labels)
        self._tokens: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.uint8]] = []
        self._source: list[int] = []
        self._row: list[int] = []

    def __len__(self) -> int:
        return len(self._row)

    def add(self, tokens: Sequence[int], loss_mask: Sequence[int], source: int, row: int) -> None:
        """Append one sample; `tokens` and `loss_mask` have one entry per token."""
        assert len(tokens) == len(loss_mask), (len(tokens), len(loss_mask))
        self._tokens.append(np.asarray(tokens, dtype=np.int32))
        self._masks.append(np.asarray(loss_mask, dtype=np.uint8))
        self._source.append(source)
        self._row.append(row)

    def build(self) -> TokenStore:
        """The store of everything added."""
        offsets = np.zeros(len(self._tokens) + 1, dtype=np.int64)
        np.cumsum([len(tokens) for tokens in self._tokens], out=offsets[1:])
        return TokenStore(
            tokens=np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.int32),
            loss_mask=np.concatenate(self._masks) if self._masks else np.zeros(0, np.uint8),
            offsets=offsets,
            source=np.asarray(self._source, dtype=np.int32),
            row=np.asarray(self._row, dtype=np.int64),
            labels=self._labels,
        )
