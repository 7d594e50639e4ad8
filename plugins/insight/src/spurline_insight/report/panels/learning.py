"""Show how training goes: loss, evaluation scores, learning rate and gradient norm over steps."""

from __future__ import annotations

import statistics
from typing import Any

from spurline_insight.health import clip_threshold
from spurline_insight.report.figure import level, line, raw_and_smoothed, series_color, step_figure
from spurline_insight.report.markup import Panel, block, caption, columns, score
from spurline_insight.report.record import (
    GIVEN_UP,
    OF_PAIRS,
    STDERR,
    evaluation_losses,
    evaluation_scores,
    evaluations_of,
    label_of,
    recorded_names,
)
from spurline_insight.report_panel import RunRecord


class LossPanel(Panel):
    """Training loss, raw and smoothed, with the held-out loss on the same axes."""

    title = "Loss"
    order = 110

    def render(self, record: RunRecord) -> str | None:
        steps, values = record.series("loss")
        traces = raw_and_smoothed("training loss", steps, values, "--series-1") if steps else []
        for index, name in enumerate(evaluation_losses(record)):
            eval_steps, eval_values = record.series(name)
            label, color = label_of(name, "evaluation"), series_color(index + 1)
            traces.append(line(label, eval_steps, eval_values, color, mode="lines+markers"))
        if not traces:
            return None
        _, rewards = record.series("reward/mean")
        if not rewards:
            unit = "per pair or answer" if recorded_names(record, OF_PAIRS) else "nats per token"
            return block(step_figure(traces, f"Loss ({unit})", label="Loss over steps"), wide=True)
        head = caption("The loss of a policy stays near 0. The reward shows whether training works.")
        return block(head, step_figure(traces, "Loss", label="Loss over steps"))


class EvaluationPanel(Panel):
    """Scores of generated answers and other evaluation metrics, except metrics of preference pairs."""

    title = "Evaluation"
    order = 120

    def render(self, record: RunRecord) -> str | None:
        shares, others = ([name for name in names if OF_PAIRS not in name] for names in evaluation_scores(record))
        drawn = ((shares, "Score", {"tickformat": ".0%", "range": [-0.02, 1.02]}), (others, "Value", {}))
        plots = [self._plot(record, names, y_title, y_axis) for names, y_title, y_axis in drawn if names]
        if not plots:
            return None
        head = _given_up(record)
        return block(head, plots[0]) if len(plots) == 1 else block(head, columns(*plots), wide=True)

    @staticmethod
    def _plot(record: RunRecord, names: list[str], y_title: str, y_axis: dict[str, Any]) -> str:
        hover = "%{y:.1%}" if y_axis else "%{y:.4~g}"
        traces = [
            line(label_of(name), *record.series(name), series_color(index + 1), mode="lines+markers")
            | {"hovertemplate": hover, "error_y": {"array": record.series(name + STDERR)[1], "thickness": 1}}
            for index, name in enumerate(names)
        ]
        return step_figure(traces, y_title, label="Evaluation scores over steps", **y_axis)


class LearningRatePanel(Panel):
    """The learning rate of each step."""

    title = "Learning rate"
    order = 300

    def render(self, record: RunRecord) -> str | None:
        steps, values = record.series("lr")
        if not steps:
            return None
        trace = line("learning rate", steps, values, "--series-3") | {"hovertemplate": "%{y:.3e}", "showlegend": False}
        peak, last = (f"{value:.2e}" if value else "0" for value in (max(values), values[-1]))
        plot = step_figure(
            [trace], "Learning rate", label="Learning rate over steps", exponentformat="power", rangemode="tozero"
        )
        return block(caption(f"Peak {peak}, last {last}"), plot)


class GradientPanel(Panel):
    """The global gradient norm before clipping, and the clipping threshold."""

    title = "Gradient norm"
    order = 310

    def render(self, record: RunRecord) -> str | None:
        steps, values = record.series("grad_norm")
        if not steps:
            return None
        traces = raw_and_smoothed("gradient norm", steps, values, "--series-4")
        head = f"Median {score(statistics.median(values))}, largest {score(max(values))}"
        threshold = clip_threshold(record.config)
        if threshold is not None:
            traces.append(level(f"clipped above {threshold:g}", steps, threshold, "--series-6"))
            clipped = sum(value > threshold for value in values)
            head += f"; {clipped / len(values):.0%} of the steps were clipped"
        return block(caption(head), step_figure(traces, "Norm", label="Norm", rangemode="tozero"))


def _given_up(record: RunRecord) -> str:
    found: list[str] = []
    for prefix in evaluations_of(record):
        steps, counts = record.series(f"{prefix}{GIVEN_UP}")
        if counts:
            most, name = max(counts), prefix.removeprefix("eval/").replace("/", ": ")
            found.append(f"{name}{most:,.0f} at step {steps[counts.index(most)]:,}")
    return caption(f"Held-out prompts given up: {'; '.join(found)}. They count as failed") if found else ""
