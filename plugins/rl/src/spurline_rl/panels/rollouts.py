"""Draw the rewards, the fate of the groups and the lengths of responses. Only RL runs record these."""

from __future__ import annotations

from collections.abc import Sequence

from spurline_insight.report.figure import (
    Trace,
    band,
    line,
    moving_means,
    one_of_several,
    raw_and_smoothed,
    series_color,
    step_figure,
    thinned,
)
from spurline_insight.report.markup import Panel, block, caption, columns, table, text
from spurline_insight.report.record import REWARD, evaluations_of, recorded_names
from spurline_insight.report_panel import RunRecord

_TERM = "rewards/"
_REASONS = {"stop": "stopped", "length": "cut off at the limit", "abort": "aborted", "error": "failed"}
_PROMPTS_SHOWN = 10


class RewardPanel(Panel):
    """Mean reward with its spread, held-out rewards beside it, and each term where there are several."""

    title = "Reward"
    order = 100

    def render(self, record: RunRecord) -> str | None:
        """Return the panel, or None if no rewards were recorded."""
        if not record.series(REWARD)[0]:
            return None
        head = caption("Mean return of the step's attempts: the weighted sum of their reward terms")
        plot = step_figure([*_spread(record), *_mean_reward(record)], "Reward", label="Reward over steps")
        terms = recorded_names(record, _TERM)
        if len(terms) < 2:
            return block(head, plot, wide=True)
        return block(head, columns(plot, _term_plot(record, terms)), wide=True)


class GroupsPanel(Panel):
    """How many groups taught nothing, were filtered, or were given up."""

    title = "Groups"
    order = 200

    def render(self, record: RunRecord) -> str | None:
        """Return the panel, or None if no groups were recorded."""
        steps, equal = record.series("groups/zero_variance")
        if not steps:
            return None
        traces = one_of_several("equal rewards", steps, equal, "--series-2", hovertemplate="%{y:.1%}")
        filtered = [
            (int(metrics["step"]), metrics["groups/filtered"] / metrics["groups/drawn"])
            for metrics in record.metrics
            if metrics.get("groups/drawn", 0) > 0 and "groups/filtered" in metrics
        ]
        if any(share > 0 for _, share in filtered):
            found, shares = [step for step, _ in filtered], [share for _, share in filtered]
            traces += one_of_several("left out", found, shares, "--series-8", hovertemplate="%{y:.1%}")
        plot = step_figure(traces, "Share of groups", label="Groups over steps", tickformat=".0%", range=[-0.02, 1.02])
        return block(caption(_fates(record)), plot, _failures(record), _reasons(record))


class ResponsesPanel(Panel):
    """Response lengths, and how responses ended."""

    title = "Responses"
    order = 210

    def render(self, record: RunRecord) -> str | None:
        """Return the panel, or None if no response lengths were recorded."""
        steps, lengths = record.series("response/length")
        if not steps:
            return None
        reasons = [name.removeprefix("response/share_") for name in recorded_names(record, "response/share_")]
        plots = [_length_plot(record, reasons)]
        if set(reasons) - {"stop"}:
            plots.append(_ending_plot(record, reasons))
        _, turns = record.series("response/turns")
        head = f"Mean {sum(lengths) / len(lengths):,.1f} tokens per attempt"
        if turns and max(turns) > 1:
            head += f", in {sum(turns) / len(turns):.3g} turns"
        if reasons == ["stop"]:
            head += "; every response ended by itself"
        return block(caption(head), *plots)


def _spread(record: RunRecord) -> list[Trace]:
    """Draw one standard deviation around the mean, smoothed as the mean is."""
    lines = [metrics for metrics in record.metrics if REWARD in metrics and "reward/std" in metrics]
    if len(lines) < 2:
        return []
    means, deviations = (moving_means([float(metrics[name]) for metrics in lines]) for name in (REWARD, "reward/std"))
    low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    return band("± standard deviation", [int(metrics["step"]) for metrics in lines], low, high, "--series-1")


def _mean_reward(record: RunRecord) -> list[Trace]:
    steps, values = record.series(REWARD)
    traces = raw_and_smoothed("reward", steps, values, "--series-1")
    for index, prefix in enumerate(evaluations_of(record)):
        held_out_steps, held_out = record.series(f"{prefix}reward")
        if held_out:
            label, color = f"{_of(prefix)} reward", series_color(index + 1)
            traces.append(line(label, held_out_steps, held_out, color, mode="lines+markers"))
    return traces


def _term_plot(record: RunRecord, terms: Sequence[str]) -> str:
    """Draw terms before weights; those of held-out prompts are dashed."""
    traces: list[Trace] = []
    for index, term in enumerate(terms):
        name, color = term.removeprefix(_TERM), series_color(index + 2)
        traces += one_of_several(name.replace("_", " "), *record.series(term), color)
        for prefix in evaluations_of(record):
            steps, values = record.series(f"{prefix}{term}")
            if values:
                label = f"{name.replace('_', ' ')} ({_of(prefix).replace('-', ' ')})"
                dashed = line(label, steps, values, color, mode="lines+markers")
                traces.append(dashed | {"line": {"color": color, "width": 1.5, "dash": "dot"}})
    return step_figure(traces, "Term before weights", label="Reward terms over steps")


def _of(prefix: str) -> str:
    """Return the name of an evaluation in a legend."""
    return prefix.removeprefix("eval/").rstrip("/") or "held-out"


def _fates(record: RunRecord) -> str:
    """Describe the fate of all prompts that were drawn."""
    totals = {
        name: sum(record.series(f"groups/{name}")[1])
        for name in ("drawn", "filtered", "quarantined", "retries", "refill_missing")
    }
    _, equal = record.series("groups/zero_variance")
    head = f"Mean {sum(equal) / len(equal):.1%} of groups with equal rewards"
    if not totals["drawn"]:
        return head
    trained = totals["drawn"] - totals["filtered"] - totals["quarantined"]
    parts = [f"{trained:,.0f} trained on"]
    if totals["filtered"]:
        parts.append(f"{totals['filtered']:,.0f} left out for equal rewards")
    if totals["refill_missing"]:
        parts[0] += f" ({totals['refill_missing']:,.0f} of them in spite of equal rewards)"
    if totals["quarantined"]:
        parts.append(f"{totals['quarantined']:,.0f} given up")
    if totals["retries"]:
        parts.append(f"{totals['retries']:,.0f} attempts made again")
    return f"{head}. Of {totals['drawn']:,.0f} prompts drawn: {', '.join(parts)}"


def _failures(record: RunRecord) -> str:
    """Draw failures per step as bars, or nothing if nothing failed."""
    traces: list[Trace] = []
    for name, label, color in (
        ("groups/retries", "attempts made again", "--series-8"),
        ("groups/quarantined", "prompts given up", "--series-6"),
    ):
        steps, counts = thinned(*record.series(name))
        if any(counts):
            bars: Trace = {"type": "bar", "name": label, "x": steps, "y": counts, "hovertemplate": "%{y:,}"}
            traces.append(bars | {"marker": {"color": color}})
    return step_figure(traces, "Failures", label="Failed attempts over steps", rangemode="tozero") if traces else ""


def _reasons(record: RunRecord) -> str:
    """List the prompts that were given up, with the reasons, once the run has ended."""
    reasons = record.summary.get("given_up") or []
    if not reasons:
        return ""
    rows = [[text(reason)] for reason in reasons[:_PROMPTS_SHOWN]]
    if len(reasons) > _PROMPTS_SHOWN:
        rows.append([f"and {len(reasons) - _PROMPTS_SHOWN:,} more, in summary.json"])
    return table(["Prompts given up"], rows)


def _length_plot(record: RunRecord, reasons: Sequence[str]) -> str:
    steps, lengths = record.series("response/length")
    traces = raw_and_smoothed("mean", steps, lengths, "--series-1")
    longest_steps, longest = record.series("response/length/max")
    if longest:
        traces.append(line("longest", longest_steps, longest, "--series-8", width=1.2, mode="lines"))
    if len(reasons) > 1:
        for reason in reasons:
            points = record.series(f"response/length_{reason}")
            traces += one_of_several(_ending(reason), *points, _ending_color(reason))
    return step_figure(traces, "Tokens", label="Response lengths over steps", rangemode="tozero", tickformat="~s")


def _ending_plot(record: RunRecord, reasons: Sequence[str]) -> str:
    """Draw shares of turns. A step without such turns recorded no share, which is 0."""
    lines = [metrics for metrics in record.metrics if "response/length" in metrics]
    steps = [int(metrics["step"]) for metrics in lines]
    traces: list[Trace] = []
    for reason in reasons:
        shares = [float(metrics.get(f"response/share_{reason}", 0.0)) for metrics in lines]
        traces += one_of_several(_ending(reason), steps, shares, _ending_color(reason), hovertemplate="%{y:.1%}")
    return step_figure(
        traces, "Share of turns", label="How turns ended, over steps", tickformat=".0%", range=[-0.02, 1.02]
    )


def _ending(reason: str) -> str:
    return _REASONS.get(reason, reason.replace("_", " "))


def _ending_color(reason: str) -> str:
    known = [*_REASONS]
    return series_color(known.index(reason) + 3 if reason in known else 7)
