"""Show in the report how waiting and age came about in a run of source `async_rollouts`.

Panel `rollout_timeline` reads RUN_DIR/timeline.jsonl, `staleness` the metrics. Totals of time are in core's panels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spurline_async_rl.timeline.configs import TimelinePanelConfig
from spurline_async_rl.timeline.figure import MAX_LANES, Window, lanes_of, last_window, staleness_color, timeline_figure
from spurline_async_rl.timeline.records import SPAN_KINDS, TIMELINE_FILE, StepRecord, read_timeline
from spurline_insight.report.figure import Trace, figure, line, one_of_several, raw_and_smoothed, step_figure
from spurline_insight.report.markup import Panel, block, caption, columns
from spurline_insight.report_panel import RunRecord

_TOKENS = "staleness/tokens_"
_WAITS = (
    ("time/wait_rollouts", "waiting for a batch", "--series-6"),
    ("time/sync", "publishing weights", "--series-1"),
    ("time/sync_pause", "engines stand still", "--series-2"),
)
_LEVELS = (
    ("async/running", "under way", "--series-2"),
    ("async/buffered", "finished, untrained", "--series-1"),
    ("async/depth", "depth of admission", "--series-6"),
)


class TimelinePanel:
    """The last steps of the run, over time."""

    title = "Timeline"

    def __init__(self, config: TimelinePanelConfig) -> None:
        self._config = config

    def render(self, record: RunRecord) -> str | None:
        """Return the panel, or None for a run that left no timeline."""
        records = read_timeline(record.run_dir / TIMELINE_FILE)
        if not records:
            return None
        window = last_window(records, self._config.steps)
        return block(caption(_caption(records, window)), timeline_figure(records, window), wide=True)


class StalenessPanel(Panel):
    """Trained tokens by age, and what the loop and the buffer did over the steps."""

    title = "Staleness"

    def render(self, record: RunRecord) -> str | None:
        """Return the panel, or None for a run that recorded no staleness."""
        tokens = _tokens_by_staleness(record)
        if not tokens:
            return None
        plots = [_histogram(tokens)]
        for y_title, label, traces, tickformat in (
            ("Updates", "Staleness of trained tokens over steps", _staleness_traces(record), None),
            ("Share of the step", "Waiting over steps", _traces(record, _WAITS, is_share=True), ".0%"),
            ("Groups, a batch just taken", "Groups under way and buffered over steps", _traces(record, _LEVELS), None),
        ):
            if traces:
                plots.append(step_figure(traces, y_title, label=label, tickformat=tickformat, rangemode="tozero"))
        return block(caption(_head(record, tokens)), columns(*plots), wide=True)


def _caption(records: Sequence[StepRecord], window: Window) -> str:
    spans = [span for record in records if window.first <= record.step <= window.last for span in record.spans]
    seconds = {kind: sum(span.seconds for span in spans if span.kind == kind) for kind in SPAN_KINDS}
    length = window.ended - window.began
    text = f"Steps {window.first:,} to {window.last:,}"
    if length > 0:
        text += f". The loop waited for batches in {seconds['wait'] / length:.1%} of the time"
        text += f" and published weights in {seconds['publish'] / length:.1%}"
    lanes = 1 + max((lane for lane, _ in lanes_of(records, window)), default=0)
    return text + (f". {MAX_LANES} of {lanes:,} lanes are drawn." if lanes > MAX_LANES else ".")


def _tokens_by_staleness(record: RunRecord) -> dict[int, float]:
    """Return the trained tokens of the whole run by their age."""
    tokens: dict[int, float] = {}
    for metrics in record.metrics:
        for name, count in metrics.items():
            age = name.removeprefix(_TOKENS)
            if age != name and age.isdecimal():
                tokens[int(age)] = tokens.get(int(age), 0.0) + float(count)
    return dict(sorted(tokens.items()))


def _head(record: RunRecord, tokens: dict[int, float]) -> str:
    total = sum(tokens.values())
    if not total:
        return "No tokens were trained on."
    mean = sum(age * count for age, count in tokens.items()) / total
    oldest = max((age for age, count in tokens.items() if count), default=0)
    text = f"Trained tokens came from weights {mean:.3g} updates old on average, {oldest} at most"
    source = record.config.get("source")
    limit = source.get("max_staleness") if isinstance(source, dict) else None
    if isinstance(limit, int):
        text += f" (max_staleness: {limit})"
    _, sent = record.series("sync/bytes")
    if sent and any(sent):
        text += f". Each publish sent {sum(sent) / sum(1 for count in sent if count) / 2**20:,.1f} MiB"
    return text + "."


def _histogram(tokens: dict[int, float]) -> str:
    total = sum(tokens.values()) or math.inf
    ages = range(max(tokens) + 1)
    bars: Trace = {
        "type": "bar",
        "x": list(ages),
        "y": [tokens.get(age, 0.0) / total for age in ages],
        "customdata": [tokens.get(age, 0.0) for age in ages],
        "marker": {"color": [staleness_color(age) for age in ages]},
        "hovertemplate": "%{y:.1%}, %{customdata:,} tokens<extra></extra>",
        "showlegend": False,
    }
    layout = {
        "xaxis": {"title": {"text": "Updates between the weights of a token and its training"}, "dtick": 1},
        "yaxis": {"title": {"text": "Share of trained tokens"}, "tickformat": ".0%", "rangemode": "tozero"},
        "bargap": 0.25,
    }
    return figure([bars], layout, label="Trained tokens by staleness")


def _staleness_traces(record: RunRecord) -> list[Trace]:
    traces: list[Trace] = []
    steps, means = record.series("staleness/mean")
    if steps:
        traces += raw_and_smoothed("mean", steps, means, "--series-1")
    steps, oldest = record.series("staleness/max")
    if steps:
        traces.append(line("oldest token", steps, oldest, "--series-6", width=1.2, mode="lines"))
    return traces


def _traces(record: RunRecord, metrics: Sequence[tuple[str, str, str]], *, is_share: bool = False) -> list[Trace]:
    """Return a line for each of these (metric, name, color) that the run has, or its share of `time/step`."""
    seconds = dict(zip(*record.series("time/step"), strict=True)) if is_share else {}
    style: Trace = {"hovertemplate": "%{y:.1%}"} if is_share else {}
    traces: list[Trace] = []
    for metric, name, color in metrics:
        values = dict(zip(*record.series(metric), strict=True))
        if is_share:
            values = {step: spent / seconds[step] for step, spent in values.items() if seconds.get(step, 0) > 0}
        if values:
            traces += one_of_several(name, [*values], [*values.values()], color, **style)
    return traces
