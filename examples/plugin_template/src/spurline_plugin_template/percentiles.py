"""Compute percentiles without numpy, since this module is imported when a config is validated."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` percent (0..100) of the values lie, with linear interpolation."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
