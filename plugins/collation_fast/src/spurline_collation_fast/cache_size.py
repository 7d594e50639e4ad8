"""Bytes of the last level cache that a core can use, as the system tells."""

from __future__ import annotations

import functools
import os
from pathlib import Path

_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

DEFAULT_BYTES = 32 << 20
"""Where nothing tells, as in some containers and virtual machines, and beside Linux."""


@functools.cache
def last_level_bytes(folder: Path = _FOLDER) -> int:
    """Size of the largest cache that the first core reads through; cores may share it. DEFAULT_BYTES where unknown."""
    return max(map(_size, folder.glob("index*/size")), default=0) or _from_sysconf() or DEFAULT_BYTES


def _size(file: Path) -> int:
    """Bytes, from a text like `32768K`; 0 for one that says nothing."""
    try:
        text = file.read_text(encoding="ascii").strip()
        return int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1)
    except (OSError, ValueError):
        return 0


def _from_sysconf() -> int:
    try:
        return max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE"))
    except (OSError, ValueError, AttributeError):
        return 0
