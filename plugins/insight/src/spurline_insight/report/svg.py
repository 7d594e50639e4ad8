"""Draw lines over steps as SVG: small and without a script, for plots that are replaced each second.

Series go in; one `<svg>` element comes out, whose text and axes take the colour of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from spurline_insight.report.figure import thinned
from spurline_insight.report.markup import text

Series = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""Name -> steps, in order, and the value at each."""

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 30, 34
_COLORS = ("#2a78d6", "#d9772b", "#2c9d62", "#b8479a", "#8a6fd1", "#b3891d", "#1c9bb0", "#d0504d")
"""Eight colors that are easy to tell apart on light and on dark pages."""
_ROUNDING = 1e-12
"""Ticks of a range that is a smaller part of its values would fall on each other."""
_SMALLEST, _LARGEST = 1e-300, 1e300
"""A range of values between them can be divided."""


def line_plot(title: str, series: Series) -> str:
    """Return one plot of all series. A value that is not finite, or too large, is a gap."""
    known = {name: _finite(steps, values) for name, (steps, values) in series.items()}
    shown = {name: points for name, points in known.items() if points[0]}
    every_step = [step for steps, _ in shown.values() for step in steps] or [0]
    every_value = [value for _, values in shown.values() for value in values] or [0.0]
    low, high = _widened(min(every_value), max(every_value))
    first, last = _widened(min(every_step), max(every_step))

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="18" font-weight="600">{text(title)}</text>']
    for tick in _ticks(low, high):
        parts.append(
            f'<path stroke="currentColor" d="M{_LEFT},{y(tick):.1f}H{_WIDTH - _RIGHT}" opacity="0.15"/>'
            f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
        )
    for tick in _ticks(first, last, whole=True):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{tick:,.0f}</text>')
    legend = _LEFT + 8.5 * len(title) + 16
    for number, (name, (steps, values)) in enumerate(shown.items()):
        color = _COLORS[number % len(_COLORS)]
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        parts.append(f'<circle cx="{x(steps[-1]):.1f}" cy="{y(values[-1]):.1f}" r="2.5" fill="{color}" stroke="none"/>')
        if len(shown) > 1:
            parts.append(f'<text x="{legend:.0f}" y="18" fill="{color}">{text(name)}</text>')
            legend += 6.5 * len(name) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{text(title)} over steps" font-family="system-ui, sans-serif" font-size="11" '
        f'fill="currentColor" stroke="none"><g>{"".join(parts)}</g></svg>'
    )


def _finite(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    pairs = [(step, value) for step, value in zip(steps, values, strict=True) if abs(value) <= _LARGEST]
    return thinned([step for step, _ in pairs], [value for _, value in pairs])


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return a range that can be divided, also around a single value, or around values that differ by rounding."""
    size = max(abs(low), abs(high))
    if high - low > max(size * _ROUNDING, _SMALLEST):
        return low, high
    room = size * 0.1 if size > _SMALLEST else 1.0
    return low - room, high + room


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return three to six round numbers within the range."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= rough)
    unit = max(1.0, float(round(unit))) if whole else unit
    ticks = [number * unit for number in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
    assert all(before < after for before, after in pairwise(ticks)), (low, high, ticks)
    return ticks
