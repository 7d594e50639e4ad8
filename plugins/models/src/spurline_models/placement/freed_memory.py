"""Give memory that was freed back to the system, for loops over tensors that are larger together than a process may be.

The C library keeps freed tensors of up to 32 MiB for later ones, and what is small and stays among them keeps it from
joining them: a process that reads a model tensor by tensor grows to any part of its size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def return_freed_memory() -> None:
    """Return freed memory to the system, well below a millisecond if there is little. Does nothing without glibc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
