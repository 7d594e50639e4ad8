"""Plots as plain plotly.js figures: data in, one HTML fragment out.

The page draws them with the plotly.js it carries. A colour is a CSS variable name such as `--series-1`, for areas also
`--series-1-faint`, which the page resolves, so that plots follow the light or dark theme. No trace has more than
`MAX_POINTS` points.
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
"""Attributes in which plotly's markup is meant."""

Trace = dict[str, Any]


def series_color(index: int) -> str:
    """One of the eight colours that tell series apart, in turn."""
    return f"--series-{index % 8 + 1}"


def thinned(steps: Sequence[int], values: Sequence[float], most: int = MAX_POINTS) -> tuple[list[int], list[float]]:
    """At most `most` points of a series, in order: first, last, and the lowest and highest of each stretch."""
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
    """Number of neighbouring points over which a series of this length is averaged."""
    return max(5, math.isqrt(num_points))


def moving_sums(values: Sequence[float], span: int) -> list[float]:
    """Sum over the window of about `span` points around each point; the window is shorter at the ends.

    Centred, as the whole series is known: a trailing average would lag behind a steep start.
    """
    sums_before = [0.0, *accumulate(values)]
    half = span // 2
    windows = [(max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values))]
    return [sums_before[end] - sums_before[start] for start, end in windows]


def moving_means(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Mean over the `smoothing_span` of points around each point, weighted when weights are given."""
    span = smoothing_span(len(values))
    weights = weights if weights is not None else [1.0] * len(values)
    tops = moving_sums([value * weight for value, weight in zip(values, weights, strict=True)], span)
    bottoms = moving_sums(weights, span)
    return [top / bottom if bottom > 0 else math.nan for top, bottom in zip(tops, bottoms, strict=True)]


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
    """A line over steps, of `most` points; they are marked when they are few. `changes` are plotly trace attributes."""
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


def raw_and_smoothed(
    name: str, steps: Sequence[int], values: Sequence[float], color: str, weights: Sequence[float] | None = None
) -> list[Trace]:
    """A faint line of the values and a strong one of their moving mean; one strong line for a short series.

    weights: of the values in that mean; all equal when not given.
    """
    if len(values) < SMOOTHED_FROM:
        return [line(name, steps, values, color)]
    means = moving_means(values, weights)
    return [
        line(name, steps, values, color, width=1, opacity=0.4, mode="lines"),
        line(f"mean of {smoothing_span(len(values))} steps", steps, means, color, width=2.5, mode="lines"),
    ]


def one_of_several(
    name: str,
    steps: Sequence[int],
    values: Sequence[float],
    color: str,
    weights: Sequence[float] | None = None,
    **changes: Any,
) -> list[Trace]:
    """`raw_and_smoothed` for plots of several series: one entry in the legend hides and shows both lines.

    Pointing at the plot shows the values themselves, not their means. `changes` are plotly trace attributes.
    """
    if len(values) < SMOOTHED_FROM:
        return [line(name, steps, values, color, **changes)]
    common: Trace = {"legendgroup": name, "mode": "lines"} | changes
    means = moving_means(values, weights)
    unread: Trace = {"hoverinfo": "skip", "hovertemplate": None}
    return [
        line(name, steps, values, color, width=1, opacity=0.35, showlegend=False, **common),
        line(name, steps, means, color, **(common | unread)),
    ]


def band(name: str, steps: Sequence[int], low: Sequence[float], high: Sequence[float], color: str) -> list[Trace]:
    """The area between two series, in a light shade. color: the name of a CSS variable."""
    common: Trace = {"mode": "lines", "hoverinfo": "skip", "hovertemplate": None, "legendgroup": name}
    return [
        line(name, steps, low, color, width=0, showlegend=False, **common),
        line(name, steps, high, color, width=0, fill="tonexty", fillcolor=f"{color}-faint", **common),
    ]


def level(name: str, steps: Sequence[int], value: float, color: str) -> Trace:
    """A dashed horizontal line across the plot."""
    ends = [steps[0], steps[-1]] if len(steps) > 1 else [steps[0] - 1, steps[0] + 1]
    return line(name, ends, [value, value], color, width=1.5, mode="lines") | {
        "line": {"color": color, "width": 1.5, "dash": "dash"},
        "hoverinfo": "skip",
        "hovertemplate": None,
    }


def step_figure(
    traces: Sequence[Trace], y_title: str, layout: Mapping[str, Any] | None = None, *, label: str, **y_axis: Any
) -> str:
    """A plot over training steps. label: what a screen reader says. `y_axis`: plotly axis attributes."""
    steps = sorted({step for trace in traces for step in trace["x"]})
    x_axis: dict[str, Any] = {"title": {"text": "Step"}, "tickformat": ",d"}
    if steps and steps[-1] - steps[0] <= 10:
        # Plotly would put ticks, all rounded to the same number, between whole steps.
        x_axis |= {"dtick": 1, "range": [steps[0] - 0.5, steps[-1] + 0.5]}
    base = {"xaxis": x_axis, "yaxis": {"title": {"text": y_title}} | y_axis, "hovermode": "x unified"}
    return figure(traces, base | dict(layout or {}), label=label)


def figure(traces: Sequence[Trace], layout: Mapping[str, Any], *, label: str) -> str:
    """Any plotly figure. `layout` is laid over the page's own theme.

    All text is shown as it is: what plotly would take for markup, such as `<b>` in the name of a run, is none. Only
    `hovertext` and templates (`hovertemplate`, `texttemplate`) are plotly's markup: give them no text of a user's.
    """
    content = json.dumps(_for_page({"data": list(traces), "layout": dict(layout)}), allow_nan=False)
    # Inside a script element only "<" could end it or open a comment.
    content = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        f'<div class="plot" role="img" aria-label="{text(label)}"></div>'
        f'<script type="application/json" class="figure">{content}</script>'
    )


def _for_page(value: Any) -> Any:
    """Plain text as plotly has it, and numbers short enough for the page; what is not finite becomes a gap."""
    if isinstance(value, Mapping):
        return {str(key): item if key in _MARKUP else _for_page(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_page(item) for item in value]
    if isinstance(value, str):
        return html.escape(value, quote=False)
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
