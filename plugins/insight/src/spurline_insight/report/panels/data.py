"""Show the training data: counts and lengths of samples, and how much of each batch is data, not padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spurline.trackers.readout import quantity
from spurline_insight.report.figure import figure, raw_and_smoothed, step_figure
from spurline_insight.report.markup import Panel, block, caption, table, text
from spurline_insight.report.record import setting
from spurline_insight.report_panel import RunRecord


class SampleLengthsPanel(Panel):
    """Counts of each split, and the lengths of the training samples. A run with rollouts has only counts."""

    title = "Data"
    order = 420

    def render(self, record: RunRecord) -> str | None:
        data = record.summary.get("data") or {}
        splits = {name: counts for name, counts in data.items() if isinstance(counts, Mapping) and counts}
        if not splits:
            return None
        if any("prompts" in counts for counts in splits.values()):
            sentences = splits.get("train", {}).get("objective") or ()
            return block(_prompt_table(splits), *(caption(sentence) for sentence in sentences))
        counted, lengths = _count_table(splits), setting(splits, "train", "lengths")
        if not setting(lengths, "counts"):
            return block(counted)
        histogram = _histogram(lengths, setting(record.config, "data", "max_length"))
        return block(f'<div class="columns even"><div>{histogram}</div>{counted}</div>', wide=True)


class PackingPanel(Panel):
    """The share of token positions in each batch that hold data, not padding."""

    title = "Batch fill"
    order = 430

    def render(self, record: RunRecord) -> str | None:
        steps, values = record.series("packing/fill")
        if not steps:
            return None
        head = f"Mean {sum(values) / len(values):.1%}"
        _, rows = record.series("packing/rows")
        if rows:
            head += f", {sum(rows) / len(rows):.3g} rows per batch"
        traces = [
            trace | {"hovertemplate": "%{y:.1%}"} for trace in raw_and_smoothed("fill", steps, values, "--series-3")
        ]
        plot = step_figure(
            traces, "Positions with data", label="Batch fill over steps", tickformat=".0%", range=[0, 1.02]
        )
        return block(caption(head), plot)


def _count_table(splits: Mapping[str, Mapping[str, Any]]) -> str:
    reasons = sorted({reason for counts in splits.values() for reason in (counts.get("dropped") or {})})
    rows: list[list[str]] = [
        ["Samples", *(_number(counts.get("samples")) for counts in splits.values())],
        ["Tokens", *(_number(counts.get("tokens")) for counts in splits.values())],
        ["Tokens per sample", *(_mean_length(counts) for counts in splits.values())],
        ["Longest sample", *(_number(counts.get("longest")) for counts in splits.values())],
        ["Tokens with loss", *(_share(counts.get("loss_share")) for counts in splits.values())],
        ["Truncated", *(_number(counts.get("truncated")) for counts in splits.values())],
    ]
    for reason in reasons:
        dropped = [_number((counts.get("dropped") or {}).get(reason, 0)) for counts in splits.values()]
        rows.append([f"Dropped: {text(reason.replace('_', ' '))}", *dropped])
    if not reasons:
        rows.append(["Dropped", *("0" for _ in splits)])
    return table(["", *splits], rows, css="numbers")


def _prompt_table(splits: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["Prompts", *(_number(counts.get("prompts")) for counts in splits.values())]]
    sources = dict.fromkeys(label for counts in splits.values() for label in counts.get("sources") or ())
    for label in sources if len(sources) > 1 else ():
        sizes = [(counts.get("sources") or {}).get(label) for counts in splits.values()]
        rows.append([f"of {text(label)}", *("" if size is None else _number(size) for size in sizes)])
    steps = [counts.get("step_of") for counts in splits.values()]
    if any(steps):
        rows.append(["Step", *(text(step) if step else "" for step in steps)])
    return table(["", *splits], rows, css="numbers")


def _histogram(lengths: Mapping[str, Sequence[float]], max_length: float | None) -> str:
    edges, counts = lengths["edges"], lengths["counts"]
    widths = [right - left for left, right in pairwise(edges)]
    bars = {
        "type": "bar",
        "name": "train samples",
        "x": [left + width / 2 for left, width in zip(edges, widths, strict=False)],
        "y": list(counts),
        "width": widths,
        "customdata": [f"{left:,.0f} to {right:,.0f}" for left, right in pairwise(edges)],
        "hovertemplate": "%{customdata} tokens: %{y:,} samples<extra></extra>",
        "marker": {"color": "--series-1", "line": {"width": 1, "color": "--surface"}},
    }
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "Tokens per sample"}},
        "yaxis": {"title": {"text": "Samples"}},
        "showlegend": False,
        "bargap": 0,
    }
    if max_length is not None and edges[0] <= max_length <= edges[-1] * 1.25:
        position = {"x0": max_length, "x1": max_length, "yref": "paper", "y0": 0, "y1": 1}
        label = {"text": "max_length ", "textangle": 0, "font": {"color": "--series-6", "size": 11.5}}
        label |= {"textposition": "end", "xanchor": "right", "yanchor": "top"}
        dashes = {"color": "--series-6", "width": 1.5, "dash": "dash"}
        layout["shapes"] = [{"type": "line", "line": dashes, "label": label, **position}]
    return figure([bars], layout, label="Histogram of sample lengths")


def _number(value: Any) -> str:
    if value is None:
        return "–"  # noqa: RUF001 - a dash, as in printed tables
    return text(f"{value:,}") if value < 1e6 else f'<span title="{value:,}">{quantity(value)}</span>'


def _mean_length(counts: Mapping[str, Any]) -> str:
    samples, tokens = counts.get("samples"), counts.get("tokens")
    return f"{tokens / samples:,.1f}" if samples and tokens is not None else _number(None)


def _share(value: float | None) -> str:
    return f"{value:.1%}" if value is not None else _number(None)
