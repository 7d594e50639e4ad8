"""Plot how well a run separates better from worse answers.

The panel is for every loss with the metrics of `spurline_preference.pairs.METRICS`, also of other packages.
"""

from __future__ import annotations

from typing import Any

from spurline_insight.report.figure import Trace, level, line, one_of_several, step_figure
from spurline_insight.report.markup import Panel, block, caption, columns
from spurline_insight.report.record import evaluations_of
from spurline_insight.report_panel import RunRecord

_REWARDS = {"preference/chosen_reward": "chosen", "preference/rejected_reward": "rejected"}
_LIKELIHOODS = {"preference/chosen_logprob": "chosen", "preference/rejected_logprob": "rejected"}
_COLORS = ("--series-2", "--series-6", "--series-3", "--series-5")


class PreferencePanel(Panel):
    """Plots of the margin, accuracy, rewards and log-probabilities of training and held-out answers."""

    title = "Preferences"
    order = 130

    def render(self, record: RunRecord) -> str | None:
        steps, margins = record.series("preference/margin")
        if not steps:
            return None
        share: dict[str, Any] = {"tickformat": ".0%", "range": [-0.02, 1.02]}
        plots = [
            plot_held_out(record, {"preference/accuracy": "accuracy"}, "In the right order", chance=0.5, **share),
            plot_held_out(record, {"preference/margin": "margin"}, "Margin"),
            plot_held_out(record, _REWARDS, "Reward"),
            plot_held_out(record, _LIKELIHOODS, "Log-probability per token"),
            plot_held_out(record, {"preference/kl": "KL"}, "Divergence from the reference model (nats)"),
        ]
        head = f"Margin {margins[-1]:.4g} at step {steps[-1]:,}"
        _, accuracies = record.series("preference/accuracy")
        if accuracies:
            head += f"; {accuracies[-1]:.1%} of this step's answers are in the right order"
        return block(caption(head), columns(*(plot for plot in plots if plot)), wide=True)


def plot_held_out(
    record: RunRecord, labels: dict[str, str], y_title: str, chance: float | None = None, **y_axis: Any
) -> str:
    """Plot training pairs as lines, and held-out pairs as points with dotted lines in the same colour."""
    hover = "%{y:.1%}" if y_axis else "%{y:.4~g}"
    traces: list[Trace] = []
    for (name, label), color in zip(labels.items(), _COLORS, strict=False):
        if not record.series(name)[0]:
            continue
        traces += one_of_several(label, *record.series(name), color, hovertemplate=hover)
        for prefix in evaluations_of(record):
            steps, values = record.series(prefix + name)
            if values:
                of = prefix.removeprefix("eval/").rstrip("/") or "held out"
                dotted = {"line": {"color": color, "width": 1.5, "dash": "dot"}, "hovertemplate": hover}
                traces.append(line(f"{label} ({of})", steps, values, color, mode="lines+markers") | dotted)
    if not traces:
        return ""
    if chance is not None:
        traces.append(level("chance", record.series(next(iter(labels)))[0], chance, "--series-8"))
    return step_figure(traces, y_title, label=f"{y_title} over steps", **y_axis)
