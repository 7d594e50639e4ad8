"""Draw plots in a notebook while a run trains, and return the metrics of a run as a DataFrame.

A plot is an SVG without a script. Its text and axes have the colour of the page's text.
"""

from __future__ import annotations

import fnmatch
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spurline.errors import UserError
from spurline.trackers.jsonl import METRICS_FILE, read_metrics
from spurline_insight.report.figure import thinned
from spurline_insight.report.markup import text

if TYPE_CHECKING:
    import pandas

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 30, 34
_COLORS = ("#2a78d6", "#d9772b", "#2c9d62", "#b8479a", "#8a6fd1", "#b3891d", "#1c9bb0", "#d0504d")
"""Eight colors that are easy to tell apart on light and on dark pages."""
_NUM_TICKS = 5
_LARGEST = 1e300
"""The largest value in a plot. Differences of larger values could overflow."""


class LivePlot:
    """Live plots of a run, below the notebook cell: `Run(loaded, on_step=LivePlot(["loss", "reward/*"])).train()`.

    Outside of a notebook, it draws nothing. If one object follows several runs in turn, each run gets its own plots.

    Args:
        metrics: Names of metrics, or patterns such as `reward/*`. Each name or pattern gets a plot of all metrics
            that match.
        every_s: Minimum time between two updates, in seconds. The last update, at the end of the run, shows all steps.
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
        plots: list[str] = []
        for pattern in self._patterns:
            names = [name for name in sorted(self._series) if fnmatch.fnmatchcase(name, pattern)]
            if names:
                plots.append(line_plot(pattern, {name: self._series[name] for name in names}))
            elif self._series:
                known = ", ".join(sorted(self._series))
                plots.append(f"<p>No step has a metric {text(pattern)} yet. The metrics are: {text(known)}.</p>")
        return "".join(plots)

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


def line_plot(title: str, series: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> str:
    """Return one plot of all series (steps and values by name). NaN, infinite and very large values are left out."""
    known = {name: _finite(steps, values) for name, (steps, values) in series.items()}
    shown = {name: points for name, points in known.items() if points[0]}
    low, high = _range([value for _, values in shown.values() for value in values])
    first, last = _range([step for steps, _ in shown.values() for step in steps])

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="18" font-weight="600">{text(title)}</text>']
    for number in range(_NUM_TICKS):
        tick = low + (high - low) * number / (_NUM_TICKS - 1)
        parts.append(
            f'<path stroke="currentColor" d="M{_LEFT},{y(tick):.1f}H{_WIDTH - _RIGHT}" opacity="0.15"/>'
            f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
        )
    ticks = {round(first + (last - first) * number / (_NUM_TICKS - 1)) for number in range(_NUM_TICKS)}
    for tick in sorted(tick for tick in ticks if first <= tick <= last):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{tick:,}</text>')
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


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value, or a range around them if they are equal."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    room = 0.0 if high > low else abs(low) * 0.1 or 1.0
    return low - room, high + room


def metrics_frame(run_dir: Path | str) -> pandas.DataFrame:
    """Return a row for each step that the run has recorded, indexed by `step`, and a column for each metric.

    Missing metrics are NaN. Raises UserError if pandas is not installed or the folder does not exist.
    """
    try:
        import pandas
    except ImportError as error:
        raise UserError("metrics_frame needs pandas. Install it: pip install pandas") from error
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run directory.")
    lines = read_metrics(folder / METRICS_FILE)
    frame = pandas.DataFrame.from_records(lines) if lines else pandas.DataFrame({"step": pandas.Series(dtype="int64")})
    return frame.set_index("step")
