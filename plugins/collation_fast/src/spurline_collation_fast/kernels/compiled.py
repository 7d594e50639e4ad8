"""The loops, compiled by numba without the interpreter lock, once per machine: the code is cached on disk.

numba keeps the cache beside the source, or in the user's cache folder where the package is read-only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import register_jitable

from spurline_collation_fast.kernels import (
    Kernels,
    fitting,
    intrinsics,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    loops,
    memory,
)
from spurline_collation_fast.kernels.planning import FittingLoops, pack_rows


class _Cache(FunctionCache):
    """numba's cache of machine code, for a function that is compiled together with others, on a disk that may fail.

    numba takes its entries for current while the function's own file is unchanged; here all files of the kernels count.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises RuntimeError when there is no folder that can be written."""
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, _source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with contextlib.suppress(OSError):
            return super().load_overload(sig, target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        # On a full disk each process compiles for itself, which costs seconds; failing would cost the run.
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


def _source_stamp() -> str:
    """Hash of all sources here: what one function is compiled to depends on those it calls."""
    digest = xxhash.xxh3_128()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    dispatcher: Any = njit(nogil=True)(function)
    # No folder is writable: not cached.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _Cache(function)
    return dispatcher


for helper in (*loops.HELPERS, memory.fetch_ahead):
    register_jitable(helper)

KERNELS = Kernels(
    name="numba",
    write_rows=_compiled(loops.write_rows),
    write_values=_compiled(loops.write_values),
    pack_rows=partial(pack_rows, FittingLoops(*map(_compiled, fitting.LOOPS))),
)
