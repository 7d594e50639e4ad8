"""Sums and norms of gradients do not depend on the order of additions, nor on how values are divided."""

from __future__ import annotations

import math
import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spurline.errors import RunFailedError
from spurline_models.exact_sums import ExactSum, add_multiples, largest_of, norm_of, sum_of_squares

values_of = st.floats(-64.0, 64.0, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32)
"""Gradients of up to 2^6 whose last bits are worth up to 2^-149."""


@st.composite
def columns(draw: st.DrawFn) -> list[list[float]]:
    width = draw(st.integers(1, 5))
    return draw(st.lists(st.lists(values_of, min_size=width, max_size=width), min_size=1, max_size=12))


def exact_sum(tensors: list[Tensor]) -> Tensor:
    total = ExactSum()
    for tensor in tensors:
        total.add(tensor)
    return total.total()


def joined_norm(parts: list[Tensor]) -> float:
    largest = largest_of(parts)
    return norm_of(sum(sum_of_squares([part], largest) for part in parts), largest)


@settings(max_examples=150, database=None)
@given(rows=columns(), data=st.data())
def test_any_order_gives_the_rounded_exact_sum(rows: list[list[float]], data: st.DataObject) -> None:
    tensors = [torch.tensor(row) for row in rows]
    total = exact_sum(tensors)
    assert torch.equal(total, exact_sum(data.draw(st.permutations(tensors))))
    for got, column in zip(total.tolist(), zip(*rows, strict=True), strict=True):
        wanted = sum(map(Fraction, column))
        rounding = Fraction(math.ulp(float(wanted))) * 2**28 if wanted else Fraction(0)
        assert abs(Fraction(got) - wanted) <= len(rows) * Fraction(1, 2**67) + rounding + Fraction(1, 2**149)


@settings(max_examples=100, database=None)
@given(values=st.lists(values_of, min_size=1, max_size=40), data=st.data())
def test_any_division_gives_the_norm_to_the_last_bits(values: list[float], data: st.DataObject) -> None:
    whole = torch.tensor(values)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    parts = [torch.from_numpy(part) for part in np.split(whole.numpy(), cuts)]
    norm = joined_norm(data.draw(st.permutations(parts)))
    assert norm == joined_norm([whole]) == joined_norm([whole.flip(0)])
    assert norm == pytest.approx(math.sqrt(sum(Fraction(value) ** 2 for value in values)), rel=1e-15, abs=1e-300)


def test_large_tensors_are_summed_in_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    size = (3, 700_001)
    tensors = [torch.randn(size, generator=generator) * 10.0**exponent for exponent in (-9, -3, 0, 2, -5)]
    total = exact_sum(tensors)
    assert torch.equal(total, exact_sum([tensor.t().contiguous().t() for tensor in tensors[::-1]]))
    wanted = torch.stack([tensor.double() for tensor in tensors]).sum(0).flatten()
    torch.testing.assert_close(total.double(), wanted, rtol=2**-23, atol=1e-18)
    assert not torch.equal(sum(tensors[1:], tensors[0]), sum(tensors[-2::-1], tensors[-1])), "fp32 sums are all equal"
    assert joined_norm(list(total.split(99_999))) == joined_norm([total])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_the_function_that_gpus_compile_adds_the_same_bits() -> None:
    """Code for a CPU has fused multiply-adds too, so this would show that a compiler rounds otherwise."""
    compiled = torch.compile(add_multiples, dynamic=True, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    plain, fused = torch.zeros(2, 2, 4_001, dtype=torch.float64)
    for exponent in (-9, -3, 0, 2, -5, -12):
        values = torch.randn(4_001, generator=generator) * 10.0**exponent
        add_multiples(*plain, values)
        compiled(*fused, values)
    assert torch.equal(plain, fused)
    assert bool(plain.any(1).all())


def test_values_beyond_the_exact_range_are_an_error_and_broken_ones_stay_visible() -> None:
    assert exact_sum([torch.full((2,), 2.0**21), torch.full((2,), -(2.0**20))]).tolist() == [2.0**20] * 2
    with pytest.raises(RunFailedError, match=r"3 gradients with values up to 4\.19e\+06"):
        exact_sum([torch.full((2,), 2.0**22), torch.full((2,), -(2.0**22)), torch.ones(2)])
    for broken in (math.nan, math.inf, -math.inf):
        assert not exact_sum([torch.tensor([1.0, broken]), torch.tensor([2.0, -broken])])[1].isfinite()
        assert not math.isfinite(joined_norm([torch.tensor([1.0]), torch.tensor([broken])]))
    assert exact_sum([torch.zeros(0)]).tolist() == []
    assert joined_norm([torch.zeros(3), torch.zeros(0)]) == 0.0
