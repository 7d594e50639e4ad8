"""Facts about tokenized data that people want to see: counts, lengths, what was left out and why."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.protocols.tokenization import Tokenized

HISTOGRAM_BINS = 40


def summarize(tokenized: Tokenized) -> dict[str, Any]:
    """JSON-able summary: samples, tokens, loss_share (0..1), dropped by reason, truncated, histogram of lengths, notes.

    Reads every loss mask, unless the tokenization brought its summary along.
    """
    if tokenized.summary is not None:
        return {**tokenized.summary, "notes": list(tokenized.notes)}
    store = tokenized.store
    lengths = store.lengths()
    counts, edges = _histogram(lengths)
    return {
        "samples": len(store),
        "tokens": int(store.offsets[-1]),
        "loss_share": float(store.loss_mask.mean()) if len(store.loss_mask) else 0.0,
        "longest": int(lengths.max(initial=0)),
        "mean_length": float(lengths.mean()) if len(store) else 0.0,
        "sources": dict(zip(store.labels, store.sizes(), strict=True)),
        "dropped": dict(tokenized.dropped),
        "dropped_examples": dict(tokenized.examples),
        "truncated": tokenized.truncated,
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
        return [f"{name}: {summary['prompts']:,} prompts"]
    lines = [
        f"{name}: {summary['samples']:,} samples, {summary['tokens']:,} tokens, mean length "
        f"{summary['mean_length']:.0f}, longest {summary['longest']:,}, {summary['loss_share']:.0%} of tokens have loss"
    ]
    for reason, count in sorted(summary["dropped"].items()):
        first = summary["dropped_examples"].get(reason)
        lines.append(f"  left out: {count:,} x {reason}" + (f" (first: {first})" if first else ""))
    if summary["truncated"]:
        lines.append(f"  cut to max_length: {summary['truncated']:,}")
    return lines + [f"  {note}" for note in summary["notes"]]
