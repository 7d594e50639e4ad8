"""Draw a timeline: what was generated, trained, published and waited for, side by side over the same seconds.

In: records of a run, and the window of them to draw. Out: one HTML fragment in the report's style. Two plots share the
time axis: groups in lanes, coloured by the staleness of their oldest token when they were trained; the loop and its
publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spurline.trackers.readout import clock
from spurline_async_rl.timeline.records import GroupSpan, Span, SpanKind, StepRecord, staleness_of, trained_steps
from spurline_insight.report.figure import Trace, figure

_MAX_GROUPS = 1500
"""More bars can neither be read nor drawn quickly."""
MAX_LANES = 128

_Timed = TypeVar("_Timed", GroupSpan, Span)


@dataclass(frozen=True)
class Window:
    """The seconds from `began` to `ended` that steps `first` to `last` took."""

    first: int
    last: int
    began: float
    ended: float


def last_window(records: Sequence[StepRecord], num_steps: int) -> Window:
    """Return the last steps, at most so many; fewer if they hold too many groups to be seen."""
    first, groups = len(records) - 1, len(records[-1].groups)
    while first > 0 and len(records) - first < num_steps:
        groups += len(records[first - 1].groups)
        if groups > _MAX_GROUPS:
            break
        first -= 1
    began = records[first - 1].until if first > 0 else 0.0
    return Window(records[first].step, records[-1].step, began, records[-1].until)


def lanes_of(records: Sequence[StepRecord], window: Window) -> list[tuple[int, GroupSpan]]:
    """Return the groups within the window, each with the lowest lane that is free when it begins."""
    shown = _within((group for record in records for group in record.groups), window)
    free_from: list[float] = []
    lanes: list[tuple[int, GroupSpan]] = []
    for group in sorted(shown, key=lambda group: (group.began, group.draw)):
        lane = next((lane for lane, free in enumerate(free_from) if free <= group.began), len(free_from))
        free_from[lane : lane + 1] = [group.ended]
        lanes.append((lane, group))
    return lanes


_STALENESS_COLORS = ("#f4b942", "#ee7b30", "#d1495b", "#9b3a8c", "#5b4bb5", "#39548f")
"""From fresh to old; readable on a light and on a dark page. Older groups have the last one."""
_UNTRAINED = {
    "buffered": ("not trained by then", "--series-8-faint", ""),
    "filtered": ("filtered", "--series-8", "/"),
    "quarantined": ("given up", "--series-6", "x"),
    "skipped": ("skipped", "--series-7", "x"),
}
_SPANS: Mapping[SpanKind, tuple[str, int, str]] = {
    "train": ("training", 0, "--series-3"),
    "wait": ("waiting for a batch", 0, "--series-6-faint"),
    "evaluate": ("evaluation", 0, "--series-4"),
    "publish": ("publishing weights", 1, "--series-1"),
}
"""Name in the legend, row (the loop, the weights) and colour."""

_STYLE = "<style>.rollout-timeline > .plot { height: 520px; }</style>"


def timeline_figure(records: Sequence[StepRecord], window: Window) -> str:
    """Return the window of the timeline as HTML."""
    lanes = lanes_of(records, window)
    traces = [*_group_traces(lanes, trained_steps(records), window), *_loop_traces(records, window)]
    num_lanes = min(MAX_LANES, 1 + max((lane for lane, _ in lanes), default=0))
    label = f"Generation, training and weight updates of steps {window.first} to {window.last} over time"
    plot = figure(traces, _layout(window, num_lanes), label=label)
    return f'{_STYLE}<div class="rollout-timeline">{plot}</div>'


def staleness_color(staleness: int) -> str:
    """Return the colour of groups and tokens that are so many updates old."""
    return _STALENESS_COLORS[min(max(staleness, 0), len(_STALENESS_COLORS) - 1)]


def _group_traces(lanes: Sequence[tuple[int, GroupSpan]], trained: Mapping[int, int], window: Window) -> list[Trace]:
    """Return a set of bars for each staleness, then one for each state of groups that were not trained."""
    by_look: dict[tuple[bool, int, str, str, str], list[tuple[int, GroupSpan]]] = {}
    for lane, group in lanes:
        if lane < MAX_LANES:
            by_look.setdefault(_look(group, trained.get(group.draw)), []).append((lane, group))
    return [
        _bars(name, [group for _, group in found], [lane + 1 for lane, _ in found], window)
        | {
            "width": 0.86,
            "marker": {
                "color": color,
                "pattern": {"shape": pattern, "size": 5},
                "line": {"color": "--surface", "width": 1},
            },
            "hovertext": [_describe(group, trained.get(group.draw)) for _, group in found],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
        for (*_, name, color, pattern), found in sorted(by_look.items())
    ]


def _look(group: GroupSpan, step: int | None) -> tuple[bool, int, str, str, str]:
    """Return two numbers that order the legend, and name, colour and pattern of a group trained at this step."""
    if step is None:
        return (True, [*_UNTRAINED].index(group.state), *_UNTRAINED[group.state])
    age = staleness_of(step, group.oldest)
    return (False, age, f"staleness {age}", staleness_color(age), "")


def _bars(name: str, spans: Sequence[GroupSpan | Span], rows: Sequence[int], window: Window) -> Trace:
    # Times count from the window's beginning: the page has too few digits for times since a long run began.
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(rows),
        "base": [span.began - window.began for span in spans],
        "x": [span.seconds for span in spans],
    }


def _describe(group: GroupSpan, step: int | None) -> str:
    versions = f"{group.oldest}" if group.oldest == group.newest else f"{group.oldest} to {group.newest}"
    fate = _UNTRAINED[group.state][0] if step is None else f"trained at step {step}"
    return (
        f"draw {group.draw}: {group.seconds:.3g} s, {group.tokens:,} tokens<br>"
        f"admitted at version {group.version}, tokens of {versions}; {fate}"
    )


def _loop_traces(records: Sequence[StepRecord], window: Window) -> list[Trace]:
    found = _within((span for record in records for span in record.spans), window)
    traces: list[Trace] = []
    for kind, (name, row, color) in _SPANS.items():
        spans = [span for span in found if span.kind == kind]
        style = {
            "width": 0.8,
            "marker": {"color": color, "line": {"width": 0}},
            "hovertemplate": f"{name}: %{{x:.3~g}} s<extra></extra>",
            "xaxis": "x",
            "yaxis": "y2",
        }
        if spans:
            traces.append(_bars(name, spans, [row] * len(spans), window) | style)
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
