"""The loops of `loops.py`, compiled by numba. They release the interpreter lock (GIL) while they run.

They are compiled once per machine. The machine code is cached next to the source file, or in the user's cache folder if
the package is read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.caching import FunctionCache
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
    """A cache of numba that ignores a full or broken disk. Each process then compiles the loops itself."""

    def _guard_against_spurious_io_errors(self) -> Any:
        return suppress(OSError)


def _compiled(function: Callable[..., Any]) -> Any:
    dispatcher: Any = njit(nogil=True)(function)
    # numba raises RuntimeError if there is no cache folder that it can write.
    with suppress(RuntimeError):
        dispatcher._cache = _Cache(function)
    return dispatcher


for helper in (loops.fill, loops.zero, loops.copy, loops.count_up, loops.fetch_ahead):
    register_jitable(helper)

write_rows = _compiled(loops.write_rows)
write_values = _compiled(loops.write_values)
longest_first = _compiled(loops.longest_first)
first_fit = _compiled(loops.first_fit)
fill_missing_rows = _compiled(loops.fill_missing_rows)
list_rows = _compiled(loops.list_rows)
place_in_rows = _compiled(loops.place_in_rows)
