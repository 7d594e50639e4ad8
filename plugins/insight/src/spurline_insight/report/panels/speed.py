"""Show how fast training is: tokens per second, and the parts of the time of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spurline.trackers.readout import clock, quantity, seconds_of_generation, training_seconds
from spurline_insight.report.figure import one_of_several, raw_and_smoothed, step_figure
from spurline_insight.report.markup import Panel, block, caption, shares
from spurline_insight.report_panel import RunRecord

_PARTS = (
    "time/batch",
    "time/forward_backward",
    "time/optimizer",
    "time/critic_forward_backward",
    "time/critic_optimizer",
    "time/after_update",
    "time/evaluate",
)
_INSIDE_BATCH = ("time/generate", "time/look_back")
_OTHER = "time/other"
_NAMES = {
    "time/forward_backward": "forward + backward",
    "time/critic_forward_backward": "critic forward + backward",
    "time/look_back": "look back (forward)",
}


class ThroughputPanel(Panel):
    """Tokens per second of training, without padding and evaluation, and response tokens per second of generation."""

    title = "Throughput"
    order = 400

    def render(self, record: RunRecord) -> str | None:
        trained, generated = training_speed(record), generation_speed(record)
        if trained is None:
            return None
        head = f"Mean {quantity(trained.mean)} tokens/s"
        if generated is not None:
            traces = one_of_several("training", trained.steps, trained.rates, "--series-5")
            traces += one_of_several("generation", generated.steps, generated.rates, "--series-2")
            head += f" in training, {quantity(generated.mean)} in generation, each counting only its own time"
        else:
            traces = raw_and_smoothed("tokens/s", trained.steps, trained.rates, "--series-5")
            head += ", evaluation not counted"
        plot = step_figure(
            traces, "Tokens per second", label="Tokens per second over steps", rangemode="tozero", tickformat="~s"
        )
        return block(caption(head), plot)


class TimeSplitPanel(Panel):
    """The total time of all steps, split into parts with their shares."""

    title = "Where the time goes"
    order = 410

    def render(self, record: RunRecord) -> str | None:
        inside = _inside_batch(record)
        lines = [_split_time(metrics, inside) for metrics in record.metrics if "time/step" in metrics]
        totals: dict[str, float] = {}
        for parts in lines:
            for name, seconds in parts.items():
                totals[name] = totals.get(name, 0.0) + seconds
        whole = sum(totals.values())
        if whole <= 0 or len(totals) < 2:
            return None
        rows: list[tuple[str, float, str]] = []
        for name, total in sorted(totals.items(), key=lambda entry: -entry[1]):
            share = total / whole
            # `time/other` may be only a rounding error.
            if name != _OTHER or share > 1e-6:
                percent = f"{share:.1%}" if share >= 0.001 else "<0.1%"
                label = "rest of the batch" if name == "time/batch" and inside else _readable(name)
                rows.append((label, share, f"{percent} · {_seconds(total)}"))
        return block(shares(rows), _list_overlapping(record, inside))


@dataclass(frozen=True)
class Speed:
    """Tokens per second at each of `steps`, and over all these steps together."""

    steps: list[int]
    rates: list[float]
    mean: float


def training_speed(record: RunRecord) -> Speed | None:
    """Return the tokens per second of training, or None if they were not recorded."""
    return _speed(record, "tokens", training_seconds)


def generation_speed(record: RunRecord) -> Speed | None:
    """Return the response tokens per second of generation, or None if no step generated."""
    return _speed(record, "rollout/tokens", seconds_of_generation)


def _speed(record: RunRecord, name: str, seconds_of: Callable[[Mapping[str, float]], float | None]) -> Speed | None:
    lines = [metrics for metrics in record.metrics if name in metrics and seconds_of(metrics)]
    if not lines:
        return None
    tokens = [float(metrics[name]) for metrics in lines]
    seconds = [seconds_of(metrics) or math.nan for metrics in lines]
    rates = [count / time_s for count, time_s in zip(tokens, seconds, strict=True)]
    return Speed([int(metrics["step"]) for metrics in lines], rates, sum(tokens) / sum(seconds))


def _inside_batch(record: RunRecord) -> list[str]:
    """Return the names of times that are parts of `time/batch` in this run. With prefetching, there are none."""
    timed = [metrics for metrics in record.metrics if "time/batch" in metrics]
    names = [name for name in _INSIDE_BATCH if any(name in metrics for metrics in timed)]
    fits = all(sum(metrics.get(name, 0.0) for name in names) <= metrics["time/batch"] for metrics in timed)
    return names if fits else []


def _split_time(metrics: Mapping[str, float], inside: Sequence[str]) -> dict[str, float]:
    parts = {name: float(metrics[name]) for name in _PARTS if name in metrics}
    nested = {name: float(metrics[name]) for name in inside if name in metrics and "time/batch" in metrics}
    if nested:
        parts |= nested | {"time/batch": parts["time/batch"] - sum(nested.values())}
    return parts | {_OTHER: max(0.0, float(metrics["time/step"]) - sum(parts.values()))}


def _list_overlapping(record: RunRecord, inside: Sequence[str]) -> str:
    """Return a line with the times that are not parts of a step, since they overlap the parts."""
    totals: dict[str, float] = {}
    for metrics in record.metrics:
        for name, value in metrics.items():
            if name.startswith("time/") and name not in (*_PARTS, *inside, _OTHER, "time/step"):
                totals[name] = totals.get(name, 0.0) + float(value)
    listed = ", ".join(f"{_readable(name)} {_seconds(total)}" for name, total in sorted(totals.items()))
    return caption(f"Also measured, overlapping the above: {listed}") if listed else ""


def _readable(name: str) -> str:
    return _NAMES.get(name) or name.removeprefix("time/").replace("_", " ")


def _seconds(seconds: float) -> str:
    return clock(seconds) if seconds >= 60 else f"{seconds:.3g} s"
