"""Facts about tokenized data that people want to see: counts, lengths, what was left out and why."""

from __future__ import annotations

from typing import Any

import numpy as np

from spurline.protocols.tokenization import Tokenized


def summarize(tokenized: Tokenized, bins: int = 40) -> dict[str, Any]:
    """JSON-able summary: samples, tokens, loss_share (0..1), dropped by reason, truncated, histogram of lengths."""
    store = tokenized.store
    lengths = store.lengths()
    counts, edges = np.histogram(lengths, bins=bins) if len(store) else (np.zeros(0, int), np.zeros(0))
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
    }


def describe(name: str, summary: dict[str, Any]) -> list[str]:
    """The same as lines of text, with a line for each reason that left samples out."""
    lines = [
        f"{name}: {summary['samples']:,} samples, {summary['tokens']:,} tokens, mean length "
        f"{summary['mean_length']:.0f}, longest {summary['longest']:,}, {summary['loss_share']:.0%} of tokens have loss"
    ]
    for reason, count in sorted(summary["dropped"].items()):
        first = summary["dropped_examples"].get(reason)
        lines.append(f"  left out: {count:,} x {reason}" + (f" (first: {first})" if first else ""))
    if summary["truncated"]:
        lines.append(f"  cut to max_length: {summary['truncated']:,}")
    return lines
