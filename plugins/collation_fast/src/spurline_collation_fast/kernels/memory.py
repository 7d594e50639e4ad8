"""Hints to the processor's caches. They change when memory is read, never what; in plain Python they do nothing.
Compiled code gets the real ones from `intrinsics.py`.
"""

from __future__ import annotations

LINE = 64
"""Bytes of a cache line."""
AHEAD = 4
"""Segments whose values are on their way while one is written: about as many lines as a core can wait for at once."""
FETCHED_LINES = 16
"""Lines of each of them that are fetched; once reading is under way, the processor looks ahead by itself."""


def fetch(values, place):
    """Bring the cache line of `values[place]` closer; `place` may lie behind the end."""


def fetch_ahead(values, begins, lengths, positions, segment):
    """Fetch the first lines of a segment that is written soon, since segments lie scattered in a store."""
    if segment + AHEAD >= positions.shape[0]:
        return
    sample = positions[segment + AHEAD]
    begin, each = begins[sample], LINE // values.itemsize
    for place in range(begin, begin + min(lengths[sample], FETCHED_LINES * each), each):
        fetch(values, place)
