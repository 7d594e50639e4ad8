"""The loops of `loops.py`, compiled by numba without the interpreter lock.

They are compiled once per machine: the machine code is cached beside the source, or in the user's cache folder where
the package is read-only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic, overload, register_jitable

from spurline_collation_fast.kernels import loops

_READ, _KEEP, _DATA = 0, 3, 1
"""Arguments of LLVM's `prefetch` instruction."""


@intrinsic
def _prefetch(_: Any, values: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), byte)
        builder.call(instruction, [address, number(_READ), number(_KEEP), number(_DATA)])
        return context.get_dummy_value()

    return types.void(values, types.intp), generate


@overload(loops.fetch)
def _fetch_in_compiled_code(values, place):
    return lambda values, place: _prefetch(values, place)  # pyright: ignore[reportCallIssue]


class _Cache(FunctionCache):
    """numba's cache of machine code on a disk that may fail.

    numba takes an entry for current while the file of the function is unchanged. Here the entry also depends on this
    file.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises RuntimeError when there is no folder that can be written."""
        super().__init__(function)
        digest = xxhash.xxh3_128()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, digest.hexdigest())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with contextlib.suppress(OSError):
            return super().load_overload(sig, target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        # On a full disk each process compiles for itself, which costs seconds; failing would cost the run.
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


def _compiled(function: Callable[..., Any]) -> Any:
    dispatcher: Any = njit(nogil=True)(function)
    # Where no folder can be written, the code is not cached.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _Cache(function)
    return dispatcher


for helper in (loops.fill, loops.zero, loops.copy, loops.count_up, loops.fetch_ahead):
    register_jitable(helper)

write_rows = _compiled(loops.write_rows)
write_values = _compiled(loops.write_values)
longest_first = _compiled(loops.longest_first)
first_fit = _compiled(loops.first_fit)
best_fit = _compiled(loops.best_fit)
fill_missing_rows = _compiled(loops.fill_missing_rows)
list_rows = _compiled(loops.list_rows)
place_in_rows = _compiled(loops.place_in_rows)
