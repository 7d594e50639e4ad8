"""Plots as SVG: no values of a run may keep one from being drawn, since that would end the run."""

from __future__ import annotations

import math
import re

import pytest

from spurline_insight.notebook import _LEFT, _RIGHT, _WIDTH, line_plot


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 1.0000000000000002],
        [1e9, 1e9 + 1e-7],
        [0.0, 5e-324],
        [1e-322, 1e-323],
        [-1e308, 1e308],
        [math.nan, math.inf],
        [0.0, 0.0],
    ],
    ids=str,
)
def test_values_that_rounding_alone_tells_apart_and_extreme_ones_are_drawn(values: list[float]) -> None:
    drawn = line_plot("loss", {"loss": ([1, 2], values)})
    assert "nan" not in drawn
    assert "inf" not in drawn


@pytest.mark.parametrize("step", [0, 1, 7, 1000])
def test_no_tick_is_drawn_outside_of_the_axes(step: int) -> None:
    drawn = line_plot("loss", {"loss": ([step], [1.0])})
    ticks = [float(x) for x in re.findall(r'<text x="([\d.-]+)" y="\d+" text-anchor="middle"', drawn)]
    assert ticks
    assert all(_LEFT <= x <= _WIDTH - _RIGHT for x in ticks)
