"""Draw a histogram of step times in the report."""

from __future__ import annotations

from spurline_insight.report.figure import figure
from spurline_insight.report.markup import block, caption
from spurline_insight.report_panel import RunRecord
from spurline_plugin_template.config import StepTimesPanelConfig
from spurline_plugin_template.percentiles import percentile


class StepTimesPanel:
    """Draws the report panel `step_times`."""

    title = "Step times"

    def __init__(self, config: StepTimesPanelConfig) -> None:
        self.config = config

    def render(self, record: RunRecord) -> str | None:
        """Return the panel as HTML. If no step time is recorded yet, return None to leave the panel out."""
        _, seconds = record.series("time/step")
        if not seconds:
            return None
        bars = {"type": "histogram", "x": seconds, "nbinsx": self.config.bins, "marker": {"color": "--series-1"}}
        axes = {"xaxis": {"title": {"text": "Seconds per step"}}, "yaxis": {"title": {"text": "Steps"}}}
        label = f"Half of {len(seconds)} steps took at most {percentile(seconds, 50):.3g} s"
        return block(
            caption(f"{label}, 99 % at most {percentile(seconds, 99):.3g} s."), figure([bars], axes, label=label)
        )
