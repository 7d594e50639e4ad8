"""Make plots as plain plotly.js figures: data in, one HTML fragment out.

The page draws them with the plotly.js that it carries. A colour is the name of a CSS variable such as `--series-1`,
for areas also `--series-1-faint`, so that plots follow the light or dark theme. A trace has at most `MAX_POINTS`
points.
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
"""Points one trace may have; longer series keep the extremes of each stretch."""

SMOOTHED_FROM = 10
"""Shorter series are drawn as they are."""

_MARKUP = frozenset({"hovertext", "hovertemplate", "texttemplate"})
"""Attributes whose values are plotly's markup."""

Trace = dict[str, Any]


def series_color(index: int) -> str:
    """Return one of the eight colours that tell series apart, in turn."""
    return f"--series-{index % 8 + 1}"


def thinned(steps: Sequence[int], values: Sequence[float], most: int = MAX_POINTS) -> tuple[list[int], list[float]]:
    """Return at most `most` points of a series: first, last, and the lowest and highest of each stretch."""
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
    """Return the number of neighbouring points over which a series of this length is averaged."""
    return max(5, math.isqrt(num_points))


def moving_means(values: Sequence[float]) -> list[float]:
    """Return the mean over the window of `smoothing_span` points around each point; it is shorter at the ends.

    The window is centred, as a trailing average would lag behind a steep start.
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
    """Return a line over steps, with marks where its points are few.

    Args:
        name: Name in the legend.
        steps: Steps of the points.
        values: Values of the points.
        color: Name of a CSS variable.
        width: Width of the line.
        most: Points that are kept.
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
    """Return a faint line of the values and a strong one of their moving mean; of a short series, one strong line."""
    if len(values) < SMOOTHED_FROM:
        return [line(name, steps, values, color)]
    means = moving_means(values)
    return [
        line(name, steps, values, color, width=1, opacity=0.4, mode="lines"),
        line(f"mean of {smoothing_span(len(values))} steps", steps, means, color, width=2.5, mode="lines"),
    ]


def one_of_several(name: str, steps: Sequence[int], values: Sequence[float], color: str, **changes: Any) -> list[Trace]:
    """Return `raw_and_smoothed` lines for a plot of several series: one entry in the legend hides and shows both.

    Pointing at the plot shows the values themselves, not their means.
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
    return line(name, ends, [value, value], color, width=1.5, mode="lines") | {
        "line": {"color": color, "width": 1.5, "dash": "dash"},
        "hoverinfo": "skip",
        "hovertemplate": None,
    }


def step_figure(
    traces: Sequence[Trace], y_title: str, layout: Mapping[str, Any] | None = None, *, label: str, **y_axis: Any
) -> str:
    """Return a plot over training steps as HTML.

    Args:
        traces: Lines of the plot.
        y_title: Title of the y axis.
        layout: Further plotly attributes of the layout.
        label: The plot in words, for screen readers.
        y_axis: Further plotly attributes of the y axis.
    """
    steps = sorted({step for trace in traces for step in trace["x"]})
    x_axis: dict[str, Any] = {"title": {"text": "Step"}, "tickformat": ",d"}
    if steps and steps[-1] - steps[0] <= 10:
        # Plotly would put ticks, all rounded to the same number, between whole steps.
        x_axis |= {"dtick": 1, "range": [steps[0] - 0.5, steps[-1] + 0.5]}
    base = {"xaxis": x_axis, "yaxis": {"title": {"text": y_title}} | y_axis, "hovermode": "x unified"}
    return figure(traces, base | dict(layout or {}), label=label)


def figure(traces: Sequence[Trace], layout: Mapping[str, Any], *, label: str) -> str:
    """Return any plotly figure as HTML. `layout` is laid over the page's own theme.

    Text is shown as it is, without markup such as `<b>`. Only `hovertext` and templates (`hovertemplate`,
    `texttemplate`) are plotly's markup, so they must not hold a user's text.
    """
    content = json.dumps(_for_page({"data": list(traces), "layout": dict(layout)}), allow_nan=False)
    # Inside a script element only "<" could end it or open a comment.
    content = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        f'<div class="plot" role="img" aria-label="{text(label)}"></div>'
        f'<script type="application/json" class="figure">{content}</script>'
    )


def _for_page(value: Any) -> Any:
    """Return the value with text escaped for plotly and numbers rounded; numbers that are not finite become gaps."""
    if isinstance(value, Mapping):
        return {str(key): item if key in _MARKUP else _for_page(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_page(item) for item in value]
    if isinstance(value, str):
        return html.escape(value, quote=False)
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
