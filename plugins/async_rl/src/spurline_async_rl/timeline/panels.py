"""Show the timeline and the staleness of a run of source `async_rollouts` in its report.

The timeline has two plots over the same seconds. One plot shows groups in lanes. The colour of a group is the age of
its oldest token when the group was trained. The other plot shows what the training loop did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spurline.trackers.readout import clock
from spurline_async_rl.timeline.records import (
    TIMELINE_FILE,
    GroupSpan,
    Span,
    SpanKind,
    StepRecord,
    read_timeline,
    staleness_of,
    trained_steps,
)
from spurline_insight.report.figure import Trace, figure, one_of_several, step_figure
from spurline_insight.report.markup import Panel, block, caption, columns
from spurline_insight.report_panel import RunRecord

_TOKENS = "staleness/tokens_"
_AGES = (("staleness/mean", "mean", "--series-1"), ("staleness/max", "oldest token", "--series-6"))
_LEVELS = (
    ("async/running", "under way", "--series-2"),
    ("async/buffered", "finished, untrained", "--series-1"),
    ("async/depth", "depth of admission", "--series-6"),
)
_MAX_STEPS = 8
_MAX_GROUPS = 1500
"""Most groups to draw. More bars would be slow to draw and impossible to read."""
_MAX_LANES = 128
_STALENESS_COLORS = ("#f4b942", "#ee7b30", "#d1495b", "#9b3a8c", "#5b4bb5", "#39548f")
"""The colours of staleness 0, 1, 2, ... The last colour is also the colour of all higher values."""
_UNTRAINED = {
    "buffered": ("not trained yet", "--series-8-faint"),
    "filtered": ("filtered", "--series-8"),
    "quarantined": ("given up", "--series-6"),
    "skipped": ("skipped", "--series-7"),
    "given back": ("generated again", "--series-5"),
}
_SPANS: Mapping[SpanKind, tuple[str, int, str]] = {
    "train": ("training", 0, "--series-3"),
    "wait": ("waiting for a batch", 0, "--series-6-faint"),
    "evaluate": ("evaluation", 0, "--series-4"),
    "publish": ("publishing weights", 1, "--series-1"),
}
"""The name in the legend, the row and the colour of each kind of span."""

_STYLE = "<style>.rollout-timeline > .plot { height: 520px; }</style>"

_Timed = TypeVar("_Timed", GroupSpan, Span)


class TimelinePanel(Panel):
    """A plot of the last steps over time, and plots of the ages of tokens and the numbers of groups in all steps."""

    title = "Timeline and staleness"

    def render(self, record: RunRecord) -> str | None:
        """Return the panel, or None if the run has neither a timeline nor metrics of staleness."""
        parts: list[str] = []
        if records := read_timeline(record.run_dir / TIMELINE_FILE):
            window = last_window(records)
            parts += [caption(_caption(records, window)), timeline_figure(records, window)]
        if tokens := _tokens_by_staleness(record):
            plots = [_histogram(tokens)]
            for y_title, label, metrics in (
                ("Updates", "Staleness of trained tokens over steps", _AGES),
                ("Groups after a batch", "Groups running and buffered over steps", _LEVELS),
            ):
                if traces := _traces(record, metrics):
                    plots.append(step_figure(traces, y_title, label=label, rangemode="tozero"))
            parts += [caption(_head(record, tokens)), columns(*plots)]
        return block(*parts, wide=True) if parts else None


def _caption(records: Sequence[StepRecord], window: Window) -> str:
    spans = [span for record in records if window.first <= record.step <= window.last for span in record.spans]
    length = window.ended - window.began
    text = f"Steps {window.first:,} to {window.last:,}"
    if length > 0:
        waited, published = (
            sum(span.seconds for span in spans if span.kind == kind) / length for kind in ("wait", "publish")
        )
        text += f". The loop waited for batches in {waited:.1%} of the time and published weights in {published:.1%}"
    lanes = 1 + max((lane for lane, _ in lanes_of(records, window)), default=0)
    return text + (f". {_MAX_LANES} of {lanes:,} lanes are drawn." if lanes > _MAX_LANES else ".")


def _tokens_by_staleness(record: RunRecord) -> dict[int, float]:
    tokens: dict[int, float] = {}
    for metrics in record.metrics:
        for name, count in metrics.items():
            if name.startswith(_TOKENS):
                age = int(name.removeprefix(_TOKENS))
                tokens[age] = tokens.get(age, 0.0) + float(count)
    return dict(sorted(tokens.items()))


def _head(record: RunRecord, tokens: dict[int, float]) -> str:
    total = sum(tokens.values())
    if not total:
        return "No tokens were trained on."
    mean = sum(age * count for age, count in tokens.items()) / total
    oldest = max((age for age, count in tokens.items() if count), default=0)
    text = f"Trained tokens were {mean:.3g} updates old on average, and {oldest} at most"
    source: Any = record.config.get("source") or {}
    return text + (f" (max_staleness: {source['max_staleness']})." if "max_staleness" in source else ".")


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
        "xaxis": {"title": {"text": "Age of a token in updates"}, "dtick": 1},
        "yaxis": {"title": {"text": "Share of trained tokens"}, "tickformat": ".0%", "rangemode": "tozero"},
        "bargap": 0.25,
    }
    return figure([bars], layout, label="Trained tokens by staleness")


def _traces(record: RunRecord, metrics: Sequence[tuple[str, str, str]]) -> list[Trace]:
    """Return the lines of each (metric, name, color) that the run has."""
    traces: list[Trace] = []
    for metric, name, color in metrics:
        steps, values = record.series(metric)
        if steps:
            traces += one_of_several(name, steps, values, color)
    return traces


@dataclass(frozen=True)
class Window:
    """The time of steps `first` to `last`."""

    first: int
    last: int
    began: float
    ended: float


def last_window(records: Sequence[StepRecord]) -> Window:
    """Return the window of the last steps: at most `_MAX_STEPS`, and fewer if they have too many groups."""
    first, groups = len(records) - 1, len(records[-1].groups)
    while first > 0 and len(records) - first < _MAX_STEPS:
        groups += len(records[first - 1].groups)
        if groups > _MAX_GROUPS:
            break
        first -= 1
    began = records[first - 1].until if first > 0 else 0.0
    return Window(records[first].step, records[-1].step, began, records[-1].until)


def lanes_of(records: Sequence[StepRecord], window: Window) -> list[tuple[int, GroupSpan]]:
    """Return (lane, group) for each group in the window. A group gets the lowest lane that is free when it begins."""
    shown = _within((group for record in records for group in record.groups), window)
    free_from: list[float] = []
    lanes: list[tuple[int, GroupSpan]] = []
    for group in sorted(shown, key=lambda group: (group.began, group.draw)):
        lane = next((lane for lane, free in enumerate(free_from) if free <= group.began), len(free_from))
        free_from[lane : lane + 1] = [group.ended]
        lanes.append((lane, group))
    return lanes


def timeline_figure(records: Sequence[StepRecord], window: Window) -> str:
    """Return the window of the timeline as HTML."""
    lanes = lanes_of(records, window)
    traces = [*_group_traces(lanes, trained_steps(records), window), *_loop_traces(records, window)]
    num_lanes = min(_MAX_LANES, 1 + max((lane for lane, _ in lanes), default=0))
    label = f"Generation, training and weight updates of steps {window.first} to {window.last} over time"
    plot = figure(traces, _layout(window, num_lanes), label=label)
    return f'{_STYLE}<div class="rollout-timeline">{plot}</div>'


def staleness_color(staleness: int) -> str:
    return _STALENESS_COLORS[min(max(staleness, 0), len(_STALENESS_COLORS) - 1)]


def _group_traces(lanes: Sequence[tuple[int, GroupSpan]], trained: Mapping[int, int], window: Window) -> list[Trace]:
    """Return a trace for each staleness, and then one for each state of untrained groups."""
    by_look: dict[tuple[bool, int, str, str], list[tuple[int, GroupSpan]]] = {}
    for lane, group in lanes:
        if lane < _MAX_LANES:
            by_look.setdefault(_look(group, trained.get(group.draw)), []).append((lane + 1, group))
    return [
        _bars(name, found, window)
        | {
            "width": 0.86,
            "marker": {"color": color, "line": {"color": "--surface", "width": 1}},
            "hovertext": [_describe(group, trained.get(group.draw)) for _, group in found],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
        for (*_, name, color), found in sorted(by_look.items())
    ]


def _look(group: GroupSpan, step: int | None) -> tuple[bool, int, str, str]:
    """Return two numbers that sort the legend, and the name and the colour of a group."""
    if step is None:
        return (True, [*_UNTRAINED].index(group.state), *_UNTRAINED[group.state])
    age = staleness_of(step, group.oldest)
    return (False, age, f"staleness {age}", staleness_color(age))


def _bars(name: str, spans: Sequence[tuple[int, GroupSpan | Span]], window: Window) -> Trace:
    # Times count from the beginning of the window, because the page rounds large numbers.
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row for row, _ in spans],
        "base": [span.began - window.began for _, span in spans],
        "x": [span.seconds for _, span in spans],
    }


def _describe(group: GroupSpan, step: int | None) -> str:
    versions = f"{group.oldest}" if group.oldest == group.newest else f"{group.oldest} to {group.newest}"
    fate = _UNTRAINED[group.state][0] if step is None else f"trained at step {step}"
    engines = f"<br>generated by {', '.join(group.engines)}" if group.engines else ""
    return (
        f"draw {group.draw}: {group.seconds:.3g} s, {group.tokens:,} tokens<br>"
        f"admitted at version {group.version}, tokens of version {versions}; {fate}{engines}"
    )


def _loop_traces(records: Sequence[StepRecord], window: Window) -> list[Trace]:
    found = _within((span for record in records for span in record.spans), window)
    traces: list[Trace] = []
    for kind, (name, row, color) in _SPANS.items():
        spans = [(row, span) for span in found if span.kind == kind]
        style = {
            "width": 0.8,
            "marker": {"color": color, "line": {"width": 0}},
            "hovertemplate": f"{name}: %{{x:.3~g}} s<extra></extra>",
            "xaxis": "x",
            "yaxis": "y2",
        }
        if spans:
            traces.append(_bars(name, spans, window) | style)
    return traces


def _within(spans: Iterable[_Timed], window: Window) -> list[_Timed]:
    return [span for span in spans if span.ended > window.began and span.began < window.ended]


def _layout(window: Window, num_lanes: int) -> dict[str, Any]:
    axis = {"gridcolor": "--grid", "linecolor": "--border", "zeroline": False, "automargin": True}
    return {
        "barmode": "overlay",
        "hovermode": "closest",
        "xaxis": {
            "title": {"text": f"Seconds from {clock(window.began)} into the run"},
            "range": [0, window.ended - window.began],
            "anchor": "y2",
        },
        "yaxis": {
            "title": {"text": "Groups under way"},
            "domain": [0.2, 1],
            "range": [0.4, num_lanes + 0.6],
            "tickformat": ",d",
            "showgrid": False,
        },
        "yaxis2": axis
        | {
            "domain": [0, 0.15],
            "range": [1.5, -0.5],
            "tickvals": [0, 1],
            "ticktext": ["loop", "weights"],
            "tickfont": {"size": 12, "color": "--muted"},
            "showgrid": False,
        },
    }
