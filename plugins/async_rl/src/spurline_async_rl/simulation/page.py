"""The page of `spurline simulate --plot`: the advice, curves, and the simulated run.

Place on the way: Comparison -> one HTML file. Drawn like a report, so it needs spurline-insight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spurline_async_rl.simulation.model import SimulatedRun
from spurline_async_rl.simulation.prediction import Comparison, Prediction, steady_run, trained_work
from spurline_async_rl.timeline.configs import StalenessPanelConfig
from spurline_async_rl.timeline.figure import timeline_figure, window_ending_at
from spurline_async_rl.timeline.panels import StalenessPanel
from spurline_insight.report.figure import Trace, figure, series_color
from spurline_insight.report.markup import block, caption, columns
from spurline_insight.report.page import write_report
from spurline_insight.report_panel import ReportPanel, RunRecord

_STEPS_DRAWN = 8


def write_page(out: Path, comparison: Comparison, config: Mapping[str, Any]) -> Path:
    """Raises RunFailedError when the file cannot be written. config: the resolved one, for the page's head."""
    current = comparison.current
    run = steady_run(comparison.workload, current.knobs, comparison.num_steps)
    record = RunRecord(out.absolute().with_suffix(""), metrics_of(run), config, {"status": "simulated"})
    lines = [*comparison.lines, *(f"Rests on: {line}." for line in comparison.workload.basis)]
    curves = columns(_curve_over_groups(comparison.found, current), _curve_over_bounds(comparison.found))
    window = window_ending_at(run.records, len(run.records) - 1, _STEPS_DRAWN)
    head = caption(f"Steps {window.first:,} to {window.last:,} of the simulated run")
    panels: list[ReportPanel] = [
        _Drawn("Prediction", block(*map(caption, lines), wide=True)),
        _Drawn("Throughput by bound and groups at once", block(curves, wide=True)),
        _Drawn("Timeline", block(head, timeline_figure(run.records, window), wide=True)),
        StalenessPanel(StalenessPanelConfig()),
    ]
    return write_report(record, panels, out)


@dataclass
class _Drawn:
    """A panel that is there already, whatever the record."""

    title: str
    content: str

    def render(self, record: RunRecord) -> str | None:
        return self.content


def metrics_of(run: SimulatedRun) -> list[dict[str, float]]:
    """One line for each step, as in metrics.jsonl of a real run; amounts of work stand for tokens."""
    by_step: dict[int, dict[int, float]] = {record.step: {} for record in run.records}
    for step, age, work in trained_work(run):
        by_step[step][age] = by_step[step].get(age, 0.0) + work
    lines: list[dict[str, float]] = []
    for record in run.records:
        ages = by_step[record.step]
        seconds = {span.kind: span.seconds for span in record.spans}
        line: dict[str, float] = {
            "step": record.step,
            "time/step": sum(length for kind, length in seconds.items() if kind != "pause"),
            "time/wait_rollouts": seconds.get("wait", 0.0),
            "time/sync": seconds.get("publish", 0.0),
            "time/sync_pause": seconds.get("pause", 0.0),
            "staleness/mean": sum(age * work for age, work in ages.items()) / (sum(ages.values()) or 1.0),
            "staleness/max": max(ages, default=0),
            "async/depth": run.depths[record.step],
        }
        if record.levels:
            line |= {"async/running": record.levels[-1].running, "async/buffered": record.levels[-1].buffered}
        lines.append(line | {f"staleness/tokens_{age}": work for age, work in sorted(ages.items())})
    return lines


def _curve_over_groups(found: Sequence[Prediction], current: Prediction) -> str:
    """Trained groups a second over the number of groups at once, a line for each bound."""
    traces: list[Trace] = []
    for index, (bound, items) in enumerate(_by_bound(found)):
        points = sorted((item.knobs.max_running, item.per_s) for item in items)
        traces.append(_line(f"max_staleness {bound}", points, series_color(index)))
    here = _line("the config", [(current.knobs.max_running, current.per_s)], "--text")
    traces.append(here | {"mode": "markers", "marker": {"color": "--text", "size": 11, "symbol": "circle-open"}})
    groups = sorted({item.knobs.max_running for item in found})
    axis = {"type": "log", "title": {"text": "Groups at once (max_concurrent_groups)"}, "tickvals": groups}
    return _plot(traces, axis, "Trained groups per second over the number of groups at once")


def _curve_over_bounds(found: Sequence[Prediction]) -> str:
    """The best throughput of each bound, and the mean staleness it comes with."""
    best = [(bound, max(items, key=lambda item: item.per_s).figures) for bound, items in _by_bound(found)]
    rate = _line("groups per second", [(bound, figures.groups_per_second) for bound, figures in best], "--series-1")
    age = _line("mean staleness", [(bound, figures.mean_staleness) for bound, figures in best], "--series-6")
    axis = {"title": {"text": "Bound (max_staleness), each with its best number of groups at once"}, "dtick": 1}
    muted = {"size": 12, "color": "--muted"}
    second = {
        "title": {"text": "Updates", "font": muted, "standoff": 10},
        "tickfont": muted,
        "overlaying": "y",
        "side": "right",
        "rangemode": "tozero",
        "showgrid": False,
        "tickformat": ".2~f",
        "automargin": True,
    }
    return _plot([rate, age | {"yaxis": "y2"}], axis, "Throughput and staleness over the bound", yaxis2=second)


def _by_bound(found: Sequence[Prediction]) -> list[tuple[int, list[Prediction]]]:
    bounds = sorted({item.knobs.max_staleness for item in found})
    return [(bound, [item for item in found if item.knobs.max_staleness == bound]) for bound in bounds]


def _line(name: str, points: Sequence[tuple[float, float]], color: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": color, "width": 2},
        "marker": {"color": color, "size": 6},
        "hovertemplate": "%{y:.3~g}",
    }


def _plot(traces: Sequence[Trace], x_axis: dict[str, Any], label: str, **layout: Any) -> str:
    y_axis = {"title": {"text": "Trained groups per second"}, "rangemode": "tozero"}
    return figure(traces, {"xaxis": x_axis, "yaxis": y_axis, "hovermode": "x unified"} | layout, label=label)
