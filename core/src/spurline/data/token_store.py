"""Store tokenized samples as flat arrays, from which collators make batches.

Tokenization fills a `TokenStore`, and a collator reads the `TokenView` of a step's indices. The arrays are in memory. A
plugin may use memory-mapped files instead, since readers only index the arrays. This module imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray


def as_array(values: Any, dtype: DTypeLike) -> NDArray[Any]:
    """Return `values` as a numpy array of `dtype`. An array that has this dtype is not copied.

    Tensors are detached and moved to the CPU first. Float tensors become float32, since numpy has no bfloat16.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    return np.asarray(values, dtype=dtype)


@dataclass(frozen=True)
class TokenStore:
    """Samples in file order, one after another in flat arrays.

    Attributes:
        tokens: int32 [T].
        loss_mask: uint8 [T], 1 for tokens that count in the loss.
        offsets: int64 [N + 1]; sample i is tokens[offsets[i]:offsets[i + 1]].
        source: int32 [N], number of each sample's dataset.
        row: int64 [N], number of each sample's row in its dataset.
        labels: Name of each dataset, for uids and reports.
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
        """Return the number of tokens of each sample, int64 [N]."""
        return np.diff(self.offsets)

    def sizes(self) -> tuple[int, ...]:
        """Return the number of samples from each dataset, in the order of `labels`."""
        return tuple(np.bincount(self.source, minlength=len(self.labels)).tolist())

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return a hex digest of everything that training reads: tokens, masks, offsets and sources."""
        return fingerprint_of(
            xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)
            for array in (self.tokens, self.loss_mask, self.offsets, self.source)
        )

    def uid(self, index: int) -> str:
        """Return the name of a sample for messages, `LABEL:ROW`. Rows are counted from 0 in each dataset."""
        return f"{self.labels[int(self.source[index])]}:{int(self.row[index])}"

    def view(self, indices: NDArray[np.int64]) -> TokenView:
        """Return the samples of these indices, in the given order, without copying tokens.

        All readers of samples call this method. A store on disk may check its files here.
        """
        return TokenView(self, np.asarray(indices, dtype=np.int64))


@dataclass(frozen=True)
class TokenView:
    """Some samples of a store, in batch order. `indices` are int64 [n]. Repeats are allowed."""

    store: TokenStore
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sample of the view, int64 [n]."""
        return self.store.offsets[self.indices + 1] - self.store.offsets[self.indices]

    def tokens(self, position: int) -> NDArray[np.int32]:
        """Return the token ids of the sample at this position of the view, int32 [length]. Do not write to them."""
        start, stop = self._bounds(position)
        return self.store.tokens[start:stop]

    def loss_mask(self, position: int) -> NDArray[np.uint8]:
        """Return the loss mask of the sample at this position of the view, uint8 [length]. Do not write to it."""
        start, stop = self._bounds(position)
        return self.store.loss_mask[start:stop]

    def uid(self, position: int) -> str:
        return self.store.uid(int(self.indices[position]))

    def _bounds(self, position: int) -> tuple[int, int]:
        index = int(self.indices[position])
        return int(self.store.offsets[index]), int(self.store.offsets[index + 1])


@dataclass(frozen=True)
class Tokenized:
    """The usable samples, with counts of the samples that were left out or cut.

    Attributes:
        store: The samples.
        dropped: Number of samples left out, by reason.
        truncated: Number of samples cut to `max_length`.
        examples: Location of the first affected sample, by reason.
        ignored: Number of rows with content that the chat template leaves out, by its kind, or with EMPTY_ANSWER.
        summary: Result of `summarize`, if it is known already.
        notes: Lines to show the user when the run starts, such as why a cache was rebuilt.
    """

    store: TokenStore
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    truncated: int = 0
    examples: Mapping[str, str] = field(default_factory=dict[str, str])
    ignored: Mapping[str, int] = field(default_factory=dict[str, int])
    summary: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Count:
    """Number of rows that were left out or changed for one reason.

    Attributes:
        reason: The reason, or an empty text for samples cut to `max_length`.
        count: Number of rows.
        first_row: The first such row.
        kept: True if `reason` is a key of `Tokenized.ignored`, so that the rows are used nevertheless.
    """

    reason: str
    count: int
    first_row: int
    kept: bool = False


@dataclass(frozen=True)
class SampleBlock:
    """Usable samples of one dataset, joined into flat arrays, and counts of rows that were left out or changed.

    Attributes:
        source: Number of the dataset.
        tokens: int32 [T].
        loss_mask: uint8 [T].
        lengths: int64 [n], tokens of each sample.
        rows: int64 [n], row of each sample in the dataset.
        num_rows: Number of rows that were encoded for the block.
        counts: Counts of rows that were left out or changed.
    """

    source: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    num_rows: int = 0
    counts: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        sizes = (len(self.tokens), len(self.loss_mask), int(self.lengths.sum()))
        assert len(set(sizes)) == 1, sizes
        assert len(self.lengths) == len(self.rows), (len(self.lengths), len(self.rows))


class TokenStoreBuilder:
    """Collects samples in memory and freezes them into a TokenStore."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = tuple(labels)
        self._blocks: list[SampleBlock] = []

    def add(self, tokens: Any, loss_mask: Any, source: int, row: int) -> None:
        """Append one sample; `tokens` and `loss_mask` have one entry per token (lists, arrays or tensors)."""
        ids, mask = as_array(tokens, np.int32), as_array(loss_mask, np.uint8)
        self.extend(SampleBlock(source, ids, mask, np.array([len(ids)], np.int64), np.array([row], np.int64)))

    def extend(self, block: SampleBlock) -> None:
        self._blocks.append(block)

    def build(self) -> TokenStore:
        sizes = np.array([len(block.rows) for block in self._blocks], np.int64)
        lengths = joined([block.lengths for block in self._blocks], np.int64)
        return TokenStore(
            tokens=joined([block.tokens for block in self._blocks], np.int32),
            loss_mask=joined([block.loss_mask for block in self._blocks], np.uint8),
            offsets=np.append(np.int64(0), np.cumsum(lengths)),
            source=np.repeat(np.array([block.source for block in self._blocks], np.int32), sizes),
            row=joined([block.rows for block in self._blocks], np.int64),
            labels=self._labels,
        )


def fingerprint_of(digests: Iterable[str]) -> str:
    """Return the `TokenStore.fingerprint` for the xxh3-128 hex digests of tokens, loss_mask, offsets and source.

    Each array has its own digest, which a writer can update while it streams samples to disk.
    """
    return xxhash.xxh3_128_hexdigest("\0".join(digests).encode())


def joined(parts: list[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """Return the arrays end to end, or an empty array of `dtype` if there are none."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


IGNORED = "ignored"
"""Prefix of keys in `Tokenized.examples` for rows with content that the chat template leaves out."""

EMPTY_ANSWER = "empty_answer"
"""Key in `Tokenized.ignored` for rows with an empty answer. Only the end token of such a row is trained."""

HISTOGRAM_BINS = 40


def summarize(tokenized: Tokenized) -> dict[str, Any]:
    """Return a summary of the samples as JSON values. This reads every loss mask, unless `tokenized` has a summary.

    `longest_at` is the uid of the longest sample.
    """
    store = tokenized.store
    lengths = store.lengths()
    longest_at = store.uid(int(lengths.argmax())) if len(lengths) else ""
    if tokenized.summary is not None:
        return {**tokenized.summary, "longest_at": longest_at, "notes": list(tokenized.notes)}
    counts, edges = _histogram(lengths)
    return {
        "samples": len(store),
        "tokens": int(store.offsets[-1]),
        "loss_share": float(store.loss_mask.mean()) if len(store.loss_mask) else 0.0,
        "longest": int(lengths.max(initial=0)),
        "longest_at": longest_at,
        "mean_length": float(lengths.mean()) if len(store) else 0.0,
        "sources": dict(zip(store.labels, store.sizes(), strict=True)),
        "dropped": dict(tokenized.dropped),
        "dropped_examples": dict(tokenized.examples),
        "truncated": tokenized.truncated,
        "ignored": dict(tokenized.ignored),
        "lengths": {"edges": edges.tolist(), "counts": counts.tolist()},
        "notes": list(tokenized.notes),
    }


def _histogram(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return counts and edges of bins. All bins have the same width, in whole tokens."""
    if not len(lengths):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // HISTOGRAM_BINS)
    edges = np.arange(shortest, longest + width + 1, width)
    counts, _ = np.histogram(lengths, bins=edges)
    return counts, edges


def describe(name: str, summary: dict[str, Any]) -> list[str]:
    """Return a summary as lines of text, with a line for each reason why samples were left out.

    If the data is not tokenized before training, the summary only has the number of `prompts` and notes.
    """
    if "prompts" in summary:
        return [f"{name}: {summary['prompts']:,} prompts", *(f"  {note}" for note in summary.get("notes", ()))]
    lines = [
        f"{name}: {summary['samples']:,} samples, {summary['tokens']:,} tokens, mean length "
        f"{summary['mean_length']:.0f}, longest {summary['longest']:,}, {summary['loss_share']:.0%} of tokens have loss"
    ]
    for reason, count in sorted(summary["dropped"].items()):
        first = summary["dropped_examples"].get(reason)
        lines.append(f"  left out: {count:,} x {reason}" + (f" (first: {first})" if first else ""))
    for what, count in sorted(summary.get("ignored", {}).items()):
        first = summary["dropped_examples"].get(f"{IGNORED} {what}")
        if what == EMPTY_ANSWER:
            lines.append(f"  {count:,} rows have an empty answer, which trains the end token alone (first: {first})")
        else:
            lines.append(f"  the chat template leaves out: {what} of {count:,} rows (first: {first})")
    if summary["truncated"]:
        lines.append(f"  cut to max_length: {summary['truncated']:,}")
    return lines + [f"  {note}" for note in summary["notes"]]
