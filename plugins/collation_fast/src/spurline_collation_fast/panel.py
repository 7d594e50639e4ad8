"""Report panel `collation`: the time to build each batch, and the time that training waited for it.

The panel reads the metrics of prefetch `async`. The report's time panel shows the totals.
"""

from __future__ import annotations

from spurline.trackers.readout import quantity
from spurline_insight.report.figure import line, raw_and_smoothed, step_figure
from spurline_insight.report.markup import Panel, block, caption, columns
from spurline_insight.report_panel import RunRecord

_NAMES = ("time/collate", "time/collate_wait", "collation/hidden")


class CollationPanel(Panel):
    """Plots of the time to build a batch, the time to wait for it, and the share of building hidden behind training."""

    title = "Collation"

    def render(self, record: RunRecord) -> str | None:
        lines = [metrics for metrics in record.metrics if all(name in metrics for name in _NAMES)]
        if not lines:
            return None
        steps = [int(metrics["step"]) for metrics in lines]
        collate, waited, hidden = ([float(metrics[name]) for metrics in lines] for name in _NAMES)
        head = _summary(collate, waited)
        series = (("build", collate, "--series-1"), ("wait", waited, "--series-6"))
        times = step_figure(
            [line(name, steps, values, color) | {"hovertemplate": "%{y:.3~s}s"} for name, values, color in series],
            "Seconds per batch",
            label="Seconds to build each batch, and seconds training waited for it",
            rangemode="tozero",
            tickformat="~s",
        )
        shares = [
            trace | {"hovertemplate": "%{y:.1%}"} for trace in raw_and_smoothed("hidden", steps, hidden, "--series-3")
        ]
        hidden_plot = step_figure(
            shares, "Hidden share", label="Share of collation hidden behind training", tickformat=".0%", range=[0, 1.02]
        )
        return block(caption(head + "."), columns(times, hidden_plot), wide=True)


def _summary(collate: list[float], waited: list[float]) -> str:
    head = f"A batch took {_milliseconds(collate)} to build; training waited {_milliseconds(waited)} for it (means)"
    if sum(collate) > 0:
        # A mean of the shares would count a quick batch as much as a slow one.
        kept = sum(max(0.0, took - wait) for took, wait in zip(collate, waited, strict=True))
        head += f". {kept / sum(collate):.1%} of all building was hidden behind training"
    return head


def _milliseconds(seconds: list[float]) -> str:
    return f"{quantity(1000 * sum(seconds) / len(seconds))} ms"
