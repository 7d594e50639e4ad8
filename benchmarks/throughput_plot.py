"""The page of `async_throughput.py --plot`: measured and predicted throughput over K and over S, and one timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spurline.protocols.report_panel import RunRecord
from spurline.report.figure import Trace, figure, series_color
from spurline.report.markup import block, caption, columns
from spurline.report.page import write_report
from spurline_async_rl.timeline.configs import TimelinePanelConfig
from spurline_async_rl.timeline.panels import TimelinePanel


@dataclass(frozen=True)
class Point:
    """One case: where it is on the axis, and its shares of the capacity."""

    x: int | str
    measured: float
    predicted: float


def write_curves(out: Path, over_k: Sequence[Point], over_s: Sequence[Point], told: str, run_dir: Path) -> Path:
    """told: what the curves were measured with. run_dir: the run whose timeline is drawn."""
    panels = [_CurvePanel(over_k, over_s, told), TimelinePanel(TimelinePanelConfig())]
    return write_report(RunRecord(run_dir, [], {}, {"status": "finished"}), panels, out)


class _CurvePanel:
    title = "Share of the capacity"

    def __init__(self, over_k: Sequence[Point], over_s: Sequence[Point], told: str) -> None:
        self._over_k = over_k
        self._over_s = over_s
        self._told = told

    def render(self, record: RunRecord) -> str | None:
        groups = [point.x for point in self._over_k]
        left = _curve(self._over_k, {"type": "log", "title": {"text": "Groups at once, K"}, "tickvals": groups})
        right = _curve(self._over_s, {"type": "category", "title": {"text": "Bound, S"}})
        return block(caption(self._told), columns(left, right), wide=True)


def _curve(points: Sequence[Point], x_axis: Mapping[str, Any]) -> str:
    series = (
        ("measured", [point.measured for point in points], "solid"),
        ("predicted", [point.predicted for point in points], "dot"),
    )
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [point.x for point in points],
            "y": values,
            "line": {"color": series_color(index), "dash": dash},
            "marker": {"color": series_color(index)},
            "hovertemplate": "%{y:.3f}",
        }
        for index, (name, values, dash) in enumerate(series)
    ]
    y_axis = {"title": {"text": "Share of the capacity"}, "range": [0, 1.05], "tickformat": ".0%"}
    layout = {"xaxis": dict(x_axis), "yaxis": y_axis, "hovermode": "x unified"}
    return figure(traces, layout, label="Share of the capacity")
