"""The built-in tool `calculator`: arithmetic, and nothing that is not."""

from __future__ import annotations

import sys

import pytest

from spurline_rl.environments.calculator import calculator


@pytest.mark.parametrize(
    ("formula", "value"),
    [("6*7", "42"), ("(1 + 2) * -3", "-9"), ("7 // 2 + 7 % 2", "4"), ("1/3", "0.333333333333"), (" 2 ** 10 ", "1024")],
)
def test_the_calculator_computes(formula, value):
    assert calculator(formula) == value


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os')",
        "x",
        "9 ** 9 ** 9",
        "True + 1",
        "1e308 * 10",
        "(-1) ** 0.5",
        "1; 2",
        "'a' * 9",
        "[1][0]",
        "",
        "1 + " * 400 + "1",
        "10**1000 * 10**1000",
        "((lambda: 1)())",
        "-" * 999 + "1",
        "(" * 400 + "1" + ")" * 400,
    ],
)
def test_the_calculator_refuses_everything_else(formula):
    with pytest.raises(ValueError, match=r"."):
        calculator(formula)


@pytest.mark.parametrize("limit", [400, 1_000, 10_000])
def test_a_formula_is_too_deep_whatever_the_interpreter_allows(limit):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        with pytest.raises(ValueError, match="nested too deeply"):
            calculator("-" * 600 + "1")
    finally:
        sys.setrecursionlimit(before)


def test_the_longest_sum_is_not_too_deep():
    assert calculator("1" + "+1" * 499) == "500"
