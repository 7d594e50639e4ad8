"""How fast training goes: tokens per second, and where the time of a step goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spurline.builtin.configs import ReportPanelConfig
from spurline.builtin.trackers.readout import clock, quantity, training_seconds
from spurline.protocols.report_panel import RunRecord
from spurline.report.figure import Trace, raw_and_smoothed, step_figure
from spurline.report.markup import block, caption, shares

_PARTS = ("time/batch", "time/forward_backward", "time/optimizer", "time/after_update", "time/evaluate")
_OTHER = "time/other"
_MAX_BARS = 40
_MAX_AREA_POINTS = 300
_SERIES = [f"--series-{number}" for number in range(1, 9)]


class ThroughputPanel:
    """Non-padding tokens per second of training; evaluation is not counted."""

    title = "Throughput"

    def __init__(self, config: ReportPanelConfig) -> None:
        self._config = config

    def render(self, record: RunRecord) -> str | None:
        """None when tokens or times were not recorded."""
        points = [
            (int(metrics["step"]), float(metrics["tokens"]), seconds)
            for metrics in record.metrics
            if "tokens" in metrics and (seconds := training_seconds(metrics)) is not None
        ]
        if not points:
            return None
        steps = [step for step, _, _ in points]
        rates = [tokens / seconds for _, tokens, seconds in points]
        # Weighted by time: an average of rates would overweight quick steps.
        traces = raw_and_smoothed("tokens/s", steps, rates, "--series-5", weights=[seconds for _, _, seconds in points])
        total_tokens, total_s = sum(point[1] for point in points), sum(point[2] for point in points)
        head = caption(f"Mean {quantity(total_tokens / total_s)} tokens/s, evaluation not counted")
        plot = step_figure(
            traces, "Tokens per second", label="Tokens per second over steps", rangemode="tozero", tickformat="~s"
        )
        return block(head, plot)


class TimeSplitPanel:
    """The parts of each step's time, stacked, and their shares of the whole run."""

    title = "Where the time goes"

    def __init__(self, config: ReportPanelConfig) -> None:
        self._config = config

    def render(self, record: RunRecord) -> str | None:
        """None when no step time was recorded."""
        lines = [_split(metrics) for metrics in record.metrics if "time/step" in metrics]
        totals: dict[str, float] = {}
        for parts in lines:
            for name, seconds in parts.items():
                totals[name] = totals.get(name, 0.0) + seconds
        whole = sum(totals.values())
        if whole <= 0 or len(totals) < 2:
            return None
        # A remainder that is only rounding would add an empty entry.
        shown = [name for name, total in totals.items() if name != _OTHER or total > 1e-6 * whole]
        names = sorted(shown, key=lambda name: -totals[name])
        rows = [
            (_readable(name), totals[name] / whole, f"{_percent(totals[name] / whole)} · {_seconds(totals[name])}")
            for name in names
        ]
        steps = [int(metrics["step"]) for metrics in record.metrics if "time/step" in metrics]
        plot = _stacked(steps, lines, names)
        return block(
            f'<div class="columns"><div>{plot}</div><div>{shares(rows)}{_within(record)}</div></div>', wide=True
        )


def _split(metrics: Mapping[str, float]) -> dict[str, float]:
    """The parts of one step, which do not overlap, and what is left of `time/step`."""
    parts = {name: float(metrics[name]) for name in _PARTS if name in metrics}
    return parts | {_OTHER: max(0.0, float(metrics["time/step"]) - sum(parts.values()))}


def _within(record: RunRecord) -> str:
    """Times that lie inside the parts, or overlap them, and so cannot be stacked."""
    totals: dict[str, float] = {}
    for metrics in record.metrics:
        for name, value in metrics.items():
            if name.startswith("time/") and name not in (*_PARTS, _OTHER, "time/step"):
                totals[name] = totals.get(name, 0.0) + float(value)
    listed = ", ".join(f"{_readable(name)} {_seconds(total)}" for name, total in sorted(totals.items()))
    return caption(f"Also measured, overlapping the above: {listed}") if listed else ""


def _stacked(steps: Sequence[int], lines: Sequence[Mapping[str, float]], names: Sequence[str]) -> str:
    """Bars for a few steps; areas over means of stretches of steps for many."""
    stretch = math.ceil(len(lines) / _MAX_AREA_POINTS)
    stretches = [lines[start : start + stretch] for start in range(0, len(lines), stretch)]
    steps = [steps[min(start + stretch, len(steps)) - 1] for start in range(0, len(lines), stretch)]
    traces: list[Trace] = []
    heights = [0.0] * len(steps)
    for index, name in enumerate(names):
        color = _SERIES[min(index, len(_SERIES) - 1)]
        values = [sum(parts.get(name, 0.0) for parts in members) / len(members) for members in stretches]
        heights = [height + value for height, value in zip(heights, values, strict=True)]
        common: Trace = {"name": _readable(name), "x": steps, "y": values, "hovertemplate": "%{y:.3~s}s"}
        if len(steps) <= _MAX_BARS:
            traces.append(common | {"type": "bar", "marker": {"color": color}})
        else:
            area: Trace = {"type": "scatter", "mode": "lines", "stackgroup": "parts", "fillcolor": color}
            traces.append(common | area | {"line": {"width": 0, "color": color, "shape": "hvh"}})
    y_title = "Seconds per step" if stretch == 1 else f"Seconds per step (means of {stretch})"
    layout = {"barmode": "stack", "showlegend": False}
    top = _axis_top(heights)
    note = caption(f"The axis ends at {_seconds(top)}; the highest point is {_seconds(max(heights))}.") if top else ""
    y_axis = {"range": [0, top]} if top else {"rangemode": "tozero"}
    return note + step_figure(traces, y_title, layout, label="Parts of the step time", **y_axis)


def _axis_top(heights: Sequence[float]) -> float | None:
    """Where to cut the axis when rare long steps (evaluation, say) would flatten all others; else None."""
    ordered = sorted(heights)
    usual = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return 2 * usual if ordered[-1] > 4 * usual > 0 else None


def _readable(name: str) -> str:
    return name.removeprefix("time/").replace("forward_backward", "forward + backward").replace("_", " ")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _seconds(seconds: float) -> str:
    return clock(seconds) if seconds >= 60 else f"{seconds:.3g} s"
