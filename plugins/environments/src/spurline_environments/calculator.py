"""The built-in tool `calculator`, which computes formulas. Its limits reject formulas that would take too long."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

Number = int | float

_LONGEST_FORMULA = 1000
_DEEPEST_FORMULA = 500
"""Largest number of nested operations."""
_SHOWN_CHARACTERS = 80
_LARGEST_BITS = 4096
"""Largest number of bits of a whole number. Larger numbers could keep the machine busy."""

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Evaluate arithmetic: numbers, parentheses and + - * / // % **."""
    if len(expression) > _LONGEST_FORMULA:
        raise ValueError(f"the formula has {len(expression)} characters, more than {_LONGEST_FORMULA}")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression[:_SHOWN_CHARACTERS]!r} is not a formula: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{expression[:_SHOWN_CHARACTERS]!r} is nested too deeply") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate(node: ast.expr, levels: int = _DEEPEST_FORMULA) -> Number:
    """Return the value of a part of the formula. Raises RecursionError if it has `levels` nested operations or more."""
    if not levels:
        raise RecursionError
    # bool is an int in Python, but True is not a number in a formula.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check_bounds(node.value)  # pyright: ignore[reportArgumentType]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand, levels - 1))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left, levels - 1), _evaluate(node.right, levels - 1)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _check_bounds(_BINARY[type(node.op)](left, right))
    text = ast.unparse(node)[:_SHOWN_CHARACTERS]
    raise ValueError(f"{text!r} is not arithmetic; use numbers, parentheses and + - * / // % **")


def _check_power(base: Number, exponent: Number) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _LARGEST_BITS:
        raise ValueError(f"{base} ** {exponent} is too large")


def _check_bounds(value: Number) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is not finite")
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        raise ValueError("the result is too large")
    return value
