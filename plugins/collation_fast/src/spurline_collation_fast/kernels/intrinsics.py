"""Compile the hints of `memory.py` to LLVM instructions. Importing this module registers them with numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

from spurline_collation_fast.kernels import memory

_READ, _KEEP, _DATA = 0, 3, 1


@intrinsic
def _fetch(_: Any, values: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        address = builder.bitcast(_address(context, builder, signature, arguments), byte)
        builder.call(instruction, [address, number(_READ), number(_KEEP), number(_DATA)])
        return context.get_dummy_value()

    return types.void(values, types.intp), generate


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@overload(memory.fetch)
def _fetch_in_compiled_code(values, place):
    return lambda values, place: _fetch(values, place)  # pyright: ignore[reportCallIssue]
