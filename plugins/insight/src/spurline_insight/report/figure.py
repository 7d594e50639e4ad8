"""Make HTML fragments with plots, which plotly.js draws on the page.

A colour is the name of a CSS variable such as `--series-1`, or `--series-1-faint` for areas, so that plots follow the
light or dark theme.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from spurline_insight.report.markup import text

MAX_POINTS = 300
"""Largest number of points of a line. Longer series are thinned."""

SMOOTHED_FROM = 10
"""Series with at least this many points are smoothed."""

_MARKUP = frozenset({"hovertext", "hovertemplate", "texttemplate"})
"""Attributes whose values contain markup of plotly. They are not escaped."""

Trace = dict[str, Any]


def series_color(index: int) -> str:
    """Return the colour of series number `index`. There are eight colours, which repeat."""
    return f"--series-{index % 8 + 1}"


def thinned(steps: Sequence[int], values: Sequence[float], most: int = MAX_POINTS) -> tuple[list[int], list[float]]:
    """Return at most `most` points of a series: the first, the last, and the lowest and highest of each interval."""
    if len(steps) <= most:
        return list(steps), list(values)
    stretches = (most - 2) // 2
    kept = {0, len(steps) - 1}
    for stretch in range(stretches):
        indices = range(stretch * len(steps) // stretches, (stretch + 1) * len(steps) // stretches)
        kept.add(min(indices, key=values.__getitem__))
        kept.add(max(indices, key=values.__getitem__))
    order = sorted(kept)
    return [steps[index] for index in order], [values[index] for index in order]


def smoothing_span(num_points: int) -> int:
    """Return the window, in points, of the moving mean of a series of this length."""
    return max(5, math.isqrt(num_points))


def moving_means(values: Sequence[float]) -> list[float]:
    """Return the mean of the `smoothing_span` points around each point. Near the ends, there are fewer points.

    The window is centred, since a trailing mean would lag behind a steep start.
    """
    sums_before = [0.0, *accumulate(values)]
    half = smoothing_span(len(values)) // 2
    windows = [(max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values))]
    return [(sums_before[end] - sums_before[start]) / (end - start) for start, end in windows]


def line(
    name: str,
    steps: Sequence[int],
    values: Sequence[float],
    color: str,
    *,
    width: float = 2,
    most: int = MAX_POINTS,
    **changes: Any,
) -> Trace:
    """Return a line over steps, with markers if it has few points.

    Args:
        name: Name in the legend.
        steps: Steps of the points.
        values: Values of the points.
        color: Name of a CSS variable.
        width: Width of the line.
        most: Largest number of points.
        changes: Further plotly attributes of the trace.
    """
    kept_steps, kept_values = thinned(steps, values, most)
    trace: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if len(kept_steps) <= 40 else "lines",
        "name": name,
        "x": kept_steps,
        "y": kept_values,
        "line": {"color": color, "width": width},
        "marker": {"color": color, "size": 5},
        "hovertemplate": "%{y:.4~g}",
    }
    return trace | changes


def raw_and_smoothed(name: str, steps: Sequence[int], values: Sequence[float], color: str) -> list[Trace]:
    """Return a faint line of the values and a strong line of their moving mean. A short series has only its values."""
    if len(values) < SMOOTHED_FROM:
        return [line(name, steps, values, color)]
    means = moving_means(values)
    return [
        line(name, steps, values, color, width=1, opacity=0.4, mode="lines"),
        line(f"mean of {smoothing_span(len(values))} steps", steps, means, color, width=2.5, mode="lines"),
    ]


def one_of_several(name: str, steps: Sequence[int], values: Sequence[float], color: str, **changes: Any) -> list[Trace]:
    """Return lines as `raw_and_smoothed` does, for a plot of several series. Both lines share one entry in the legend.

    Hovering shows the values, not their means.
    """
    if len(values) < SMOOTHED_FROM:
        return [line(name, steps, values, color, **changes)]
    common: Trace = {"legendgroup": name, "mode": "lines"} | changes
    means = moving_means(values)
    unread: Trace = {"hoverinfo": "skip", "hovertemplate": None}
    return [
        line(name, steps, values, color, width=1, opacity=0.35, showlegend=False, **common),
        line(name, steps, means, color, **(common | unread)),
    ]


def band(name: str, steps: Sequence[int], low: Sequence[float], high: Sequence[float], color: str) -> list[Trace]:
    """Return the area between two series, in a light shade of the colour."""
    common: Trace = {"mode": "lines", "hoverinfo": "skip", "hovertemplate": None, "legendgroup": name}
    return [
        line(name, steps, low, color, width=0, showlegend=False, **common),
        line(name, steps, high, color, width=0, fill="tonexty", fillcolor=f"{color}-faint", **common),
    ]


def level(name: str, steps: Sequence[int], value: float, color: str) -> Trace:
    """Return a dashed horizontal line across the plot."""
    ends = [steps[0], steps[-1]] if len(steps) > 1 else [steps[0] - 1, steps[0] + 1]
    dashes = {"color": color, "width": 1.5, "dash": "dash"}
    return line(name, ends, [value, value], color, mode="lines", line=dashes, hoverinfo="skip", hovertemplate=None)


def step_figure(traces: Sequence[Trace], y_title: str, *, label: str, **y_axis: Any) -> str:
    """Return a plot over training steps as HTML.

    Args:
        traces: Lines of the plot.
        y_title: Title of the y axis.
        label: A description of the plot for screen readers.
        y_axis: Further plotly attributes of the y axis.
    """
    steps = sorted({step for trace in traces for step in trace["x"]})
    x_axis: dict[str, Any] = {"title": {"text": "Step"}, "tickformat": ",d"}
    if steps and steps[-1] - steps[0] <= 10:
        # Otherwise plotly would put ticks between whole steps, and label them with rounded numbers.
        x_axis |= {"dtick": 1, "range": [steps[0] - 0.5, steps[-1] + 0.5]}
    layout = {"xaxis": x_axis, "yaxis": {"title": {"text": y_title}} | y_axis, "hovermode": "x unified"}
    return figure(traces, layout, label=label)


def figure(traces: Sequence[Trace], layout: Mapping[str, Any], *, label: str) -> str:
    """Return any plotly figure as HTML. `layout` overrides the page's theme.

    Text is escaped, so markup such as `<b>` is shown as it is. `hovertext`, `hovertemplate` and `texttemplate` are not
    escaped, so they must not hold a user's text.
    """
    content = json.dumps(_for_page({"data": list(traces), "layout": dict(layout)}), allow_nan=False)
    # In a script element, "<" could end the element or begin a comment.
    content = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        f'<div class="plot" role="img" aria-label="{text(label)}"></div>'
        f'<script type="application/json" class="figure">{content}</script>'
    )


def _for_page(value: Any) -> Any:
    """Return the value with escaped text and rounded numbers. NaN and infinity become gaps."""
    if isinstance(value, Mapping):
        return {str(key): item if key in _MARKUP else _for_page(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_page(item) for item in value]
    if isinstance(value, str):
        return html.escape(value, quote=False)
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
