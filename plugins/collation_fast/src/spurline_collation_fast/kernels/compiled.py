"""The loops, compiled by numba without the interpreter lock, once per machine: the code is cached on disk.

numba keeps the cache beside the source, or in the user's cache folder where the package is read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import register_jitable

from spurline_collation_fast.kernels import (
    Kernels,
    fitting,
    intrinsics,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    loops,
    memory,
)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # No folder is writable; compiling in each process costs seconds, failing would cost the run.
        return njit(nogil=True)(function)


for helper in (*loops.HELPERS, *fitting.HELPERS, memory.fetch_ahead):
    register_jitable(helper)

KERNELS = Kernels(
    name="numba",
    write_rows=_compiled(loops.write_rows),
    write_values=_compiled(loops.write_values),
    pack_rows=_compiled(fitting.pack_rows),
)
