"""Which parameters an optimizer steps on together where its step needs memory of its own for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

VALUES_AT_ONCE = 1 << 25
"""Values of the parameters of a bucket, but for a parameter that has more."""


def step_buckets(sizes: Mapping[str, int], *, apart: bool) -> list[list[str]]:
    """Names of parameters that are stepped on together.

    sizes: number of values by name. apart: False for all at once.
    """
    if not apart:
        return [list(sizes)]
    buckets: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not buckets:
            buckets.append([])
            room = VALUES_AT_ONCE
        buckets[-1].append(name)
        room -= size
    return buckets
