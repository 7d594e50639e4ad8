"""How much of a batch the processor's caches hold, as the system tells; decides how columns are written, never what.

A column that fits into the last level is written through it: the copy to the device, or the model on the CPU, reads it
back from there. One that does not fit would only push out what is in there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_TOLD_BY = Path("/sys/devices/system/cpu/cpu0/cache")
_LAST_LEVEL = 3
_UNTOLD_BYTES = 32 << 20
"""Of the last level where the system does not tell: what servers have for each group of cores, at the least."""
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@cache
def last_level_bytes(told_by: Path = _TOLD_BY) -> int:
    """Size of the last-level cache of the first core, which others may share."""
    for folder in sorted(told_by.glob("index*")):
        try:
            level = int((folder / "level").read_text())
            size = (folder / "size").read_text().strip()
            if level == _LAST_LEVEL:
                return int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    return _UNTOLD_BYTES


def past_caches_from_bytes() -> int:
    """Bytes of a batch from which on it is written past the caches: several times the last level. Scattered stores past
    them lost at all sizes that were measured on a Zen 4 core, up to 4 times its 32 MiB."""
    return 8 * last_level_bytes()
