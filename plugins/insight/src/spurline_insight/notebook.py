"""Draw plots that grow while a run trains in a notebook, and give its metrics as a DataFrame.

`Run(loaded, on_step=LivePlot(["loss", "reward/*"])).train()`. Outside of a notebook a LivePlot draws nothing.
A plot is an SVG without a script, whose text and axes take the colour of the page.
"""

from __future__ import annotations

import fnmatch
import math
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spurline.errors import UserError
from spurline.trackers.jsonl import metrics_frame as metrics_frame
from spurline_insight.report.figure import thinned
from spurline_insight.report.markup import text

__all__ = ["LivePlot", "metrics_frame"]

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


class LivePlot:
    """Plots below the cell that are replaced in place as steps are done; for `Run(on_step=...)`.

    One object may follow several runs, one after the other: each gets its own plots.

    Args:
        metrics: One plot each: a metric's name, or a pattern such as `reward/*`, whose metrics share a plot.
        every_s: Least seconds between two pictures; the last picture has all steps.
    """

    def __init__(self, metrics: str | Sequence[str] = ("loss",), *, every_s: float = 1.0) -> None:
        self._patterns = [metrics] if isinstance(metrics, str) else list(metrics)
        if not self._patterns or not all(isinstance(pattern, str) for pattern in self._patterns):
            raise UserError(f"LivePlot({metrics!r}): give names of metrics, such as ['loss', 'reward/*'].")
        self._every_s = every_s
        self._begin()

    def _begin(self) -> None:
        self._series: dict[str, tuple[list[int], list[float]]] = {}
        self._display: str | None = None
        self._drawn_at = float("-inf")
        self._is_drawn, self._has_ended = True, False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._has_ended:
            self._begin()
        for name, value in metrics.items():
            steps, values = self._series.setdefault(name, ([], []))
            steps.append(step)
            values.append(float(value))
        self._is_drawn = False
        if time.monotonic() - self._drawn_at >= self._every_s:
            self._draw()

    def close(self) -> None:
        """Draw the last steps at the end of the run."""
        if not self._is_drawn:
            self._draw()
        self._has_ended = True

    def _repr_html_(self) -> str:
        return "".join(self._plots())

    def _plots(self) -> list[str]:
        plots: list[str] = []
        for pattern in self._patterns:
            names = [name for name in sorted(self._series) if fnmatch.fnmatchcase(name, pattern)]
            if names:
                plots.append(line_plot(pattern, {name: self._series[name] for name in names}))
            elif self._series:
                known = ", ".join(sorted(self._series))
                plots.append(f"<p>No step has a metric {text(pattern)} yet. There are: {text(known)}.</p>")
        return plots

    def _draw(self) -> None:
        self._drawn_at, self._is_drawn = time.monotonic(), True
        if not _is_notebook():
            return
        from IPython.display import HTML, display, update_display

        picture = HTML(self._repr_html_())
        if self._display is None:
            self._display = uuid.uuid4().hex
            display(picture, display_id=self._display)
        else:
            update_display(picture, display_id=self._display)


def _is_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


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
