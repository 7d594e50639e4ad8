"""Draw the page of `async_throughput.py --plot`: throughput and mean age of tokens, measured and predicted, by knob."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paced_runs import Predicted, Result

from spurline_insight.report.figure import Trace, figure, series_color
from spurline_insight.report.markup import block, caption, columns
from spurline_insight.report.page import write_report
from spurline_insight.report_panel import RunRecord


@dataclass(frozen=True)
class Curve:
    """The effect of one setting.

    Attributes:
        axis: The name of the setting.
        told: The values of the other settings, as text.
        points: Pairs of a value and a result. A value may have a result for each depth.
    """

    axis: str
    told: str
    points: Sequence[tuple[int | str, Result]]
    is_log: bool = False


def write_curves(out: Path, curves: Sequence[Curve], told: str) -> Path:
    """Write the page, and return its path. `told` describes the settings of all curves."""
    panels = [_CurvePanel(curve, told) for curve in curves]
    num_steps = max(item.case.steps for curve in curves for _, item in curve.points)
    record = RunRecord(out.absolute().with_suffix(""), [{"step": num_steps}], {}, {"status": "finished"})
    return write_report(record, panels, out)


class _CurvePanel:
    def __init__(self, curve: Curve, told: str) -> None:
        self.title = curve.axis
        self._curve = curve
        self._told = told

    def render(self, record: RunRecord) -> str | None:
        share = {"title": {"text": "Share of the capacity"}, "range": [0, 1.05], "tickformat": ".0%"}
        age = {"title": {"text": "Mean age, updates"}, "rangemode": "tozero"}
        left = _plot(self._curve, lambda item: item.efficiency, share)
        right = _plot(self._curve, lambda item: item.mean_age, age)
        return block(caption(f"{self._curve.told}; {self._told}"), columns(left, right), wide=True)


def _plot(curve: Curve, value: Callable[[Result | Predicted], float], y_axis: dict[str, Any]) -> str:
    traces = [trace for number, depth in enumerate(("full", "auto")) for trace in _traces(curve, depth, number, value)]
    x_axis: dict[str, Any] = {"title": {"text": curve.axis}, "type": "log" if curve.is_log else "category"}
    if curve.is_log:
        x_axis["tickvals"] = sorted({x for x, _ in curve.points})
    layout = {"xaxis": x_axis, "yaxis": y_axis, "hovermode": "x unified"}
    return figure(traces, layout, label=f"{y_axis['title']['text']} by {curve.axis}")


def _traces(curve: Curve, depth: str, number: int, value: Callable[[Result | Predicted], float]) -> list[Trace]:
    """Return the lines of one depth. The synchronous source has no depth, so its result is in the lines of both."""
    found = [(x, item) for x, item in curve.points if item.case.depth == depth or item.case.max_staleness is None]
    color = series_color(number)
    shared: Trace = {"type": "scatter", "x": [x for x, _ in found], "hovertemplate": "%{y:.3f}"}
    return [
        shared
        | {
            "name": f"{depth}, measured",
            "mode": "lines+markers",
            "y": [value(item) for _, item in found],
            "line": {"color": color},
            "marker": {"color": color},
        },
        shared
        | {
            "name": f"{depth}, predicted",
            "mode": "lines",
            "y": [value(item.predicted) for _, item in found],
            "line": {"color": color, "dash": "dot"},
        },
    ]
