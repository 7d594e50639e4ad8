"""Tokenized samples as flat arrays: the form in which data waits to be batched.

Place on the way: tokenization -> TokenStore -> (indices of a step) TokenView -> collator. In memory here; a plugin may
back the same arrays by memory-mapped files, since nothing but numpy indexing is used. Imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray


def as_array(values: Any, dtype: DTypeLike) -> NDArray[Any]:
    """`values` as a numpy array of `dtype`; an array that already is one is returned as it is.

    Tensors are detached and moved to the CPU first; bfloat16, which numpy does not know, goes through float32.
    """
    if isinstance(values, np.ndarray):
        return np.asarray(values, dtype=dtype)
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    return np.asarray(values, dtype=dtype)


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
        """Hex digest of everything training can see: tokens, masks, offsets, sources. A mapped store knows it already.

        See `fingerprint_of` for how it is made of one digest per array.
        """
        return fingerprint_of(
            xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)
            for array in (self.tokens, self.loss_mask, self.offsets, self.source)
        )

    def uid(self, index: int) -> str:
        """Name of a sample for people: `LABEL:ROW`, the row counted from 0 in its dataset."""
        return f"{self.labels[int(self.source[index])]}:{int(self.row[index])}"

    def view(self, indices: NDArray[np.int64]) -> TokenView:
        """Return the chosen samples, in that order; no tokens are copied.

        Every reader of samples comes through here, so a store on disk can check what it is about to hand out.
        """
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


@dataclass(frozen=True)
class Tokenized:
    """The usable samples, and how many were left out or cut and why.

    dropped: reason -> samples left out. truncated: samples cut to `max_length`.
    examples: reason -> location of the first sample it happened to.
    ignored: what the chat template leaves out -> samples that are trained on without it (`data.on_ignored: warn`).
    summary: what `summarize` would find, when it is known already; it is then not looked for.
    notes: lines to show the user when the run starts, such as why a cache was rebuilt.
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
    """Rows that met one fate. reason: why they were left out; empty for samples cut to `max_length`. kept: they are
    samples all the same, and `reason` is what the chat template leaves out of them."""

    reason: str
    count: int
    first_row: int
    kept: bool = False


@dataclass(frozen=True)
class SampleBlock:
    """Usable samples of one dataset, end to end, and counts of its other rows.

    source: number of the dataset. tokens: int32 [T]. loss_mask: uint8 [T]. lengths, rows: int64 [n], tokens of each
    sample and its row in the dataset. num_rows: rows the block was made of.
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


class SampleSink(Protocol):
    """A place for tokenized samples: into memory (TokenStoreBuilder) or to disk."""

    def extend(self, block: SampleBlock) -> None:
        """Append the samples of a block."""
        ...

    def build(self) -> TokenStore:
        """Return the store of everything appended."""
        ...


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
        """Append the samples of a block."""
        self._blocks.append(block)

    def build(self) -> TokenStore:
        """Return the store of everything added."""
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
    """`TokenStore.fingerprint` from the xxh3-128 hex digests of tokens, loss_mask, offsets and source, in that order.

    One digest per array, so that a writer can keep all four while samples stream past.
    """
    return xxhash.xxh3_128_hexdigest("\0".join(digests).encode())


def keys_of_samples(store: TokenStore, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of the tokens of each of these samples, equal for equal ones. Each takes two microseconds."""
    view = store.view(indices)
    return np.array(
        [xxhash.xxh3_64_intdigest(np.ascontiguousarray(view.tokens(i)).data) for i in range(len(view))], np.uint64
    )


def joined(parts: list[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """Return the arrays end to end; an empty array of `dtype` when there are none."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


IGNORED = "ignored"
"""Prefix of the key in `Tokenized.examples` for the first row whose content the chat template leaves out in part."""

EMPTY_ANSWER = "empty_answer"
"""Counted as what a template leaves out is: the row is a sample, and trains an answer of nothing but its end."""

HISTOGRAM_BINS = 40


def summarize(tokenized: Tokenized) -> dict[str, Any]:
    """JSON-able summary: samples, tokens, loss_share (0..1), dropped by reason, truncated, histogram of lengths, notes.

    `longest` is the length of the longest sample, `longest_at` its uid.

    Reads every loss mask, unless the tokenization brought its summary along.
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
    """Counts and edges of bins that are a whole number of tokens wide, so that no bin is favoured by rounding."""
    if not len(lengths):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // HISTOGRAM_BINS)
    edges = np.arange(shortest, longest + width + 1, width)
    counts, _ = np.histogram(lengths, bins=edges)
    return counts, edges


def describe(name: str, summary: dict[str, Any]) -> list[str]:
    """The same as lines of text, with a line for each reason that left samples out.

    Of data that is not tokenized beforehand, `prompts` is all that is known.
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
