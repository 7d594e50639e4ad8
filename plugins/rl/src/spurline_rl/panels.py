"""Draw the report panels of RL runs: rewards, groups, responses, policy, and the mismatch of trainer and engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spurline_insight.health import LARGEST_MISMATCH
from spurline_insight.report.figure import (
    Trace,
    band,
    level,
    line,
    moving_means,
    one_of_several,
    raw_and_smoothed,
    series_color,
    step_figure,
)
from spurline_insight.report.markup import Panel, block, caption, columns, score, table, text
from spurline_insight.report.record import REWARD, evaluations_of, recorded_names
from spurline_insight.report_panel import RunRecord

_TERM = "rewards/"
_ENDINGS = {
    "stop": ("stopped", "--series-4"),
    "length": ("cut off at the limit", "--series-5"),
    "abort": ("aborted", "--series-6"),
    "error": ("failed", "--series-7"),
}
"""Label and colour for each reason why a turn ends."""
_PROMPTS_SHOWN = 10
_KL = {"policy/kl_old": "before the update", "policy/kl_reference": "reference model"}
_CRITIC = {"value/predicted": "predicted", "value/return": "return"}
_SAME = 1e-4
"""Ratios that differ by less than this number differ only by rounding."""
_SHARE: Mapping[str, Any] = {"tickformat": ".0%", "range": [-0.02, 1.02]}
"""Settings of an axis for shares from 0 to 1."""


class RewardPanel(Panel):
    """Mean reward with its spread, held-out rewards, and the reward terms if there are several."""

    title = "Reward"
    order = 100

    def render(self, record: RunRecord) -> str | None:
        if not record.series(REWARD)[0]:
            return None
        head = caption("Mean return of the step's attempts: the weighted sum of their reward terms")
        plot = step_figure([*_spread(record), *_mean_reward(record)], "Reward", label="Reward over steps")
        terms = recorded_names(record, _TERM)
        if len(terms) < 2:
            return block(head, plot, wide=True)
        return block(head, columns(plot, _term_plot(record, terms)), wide=True)


class GroupsPanel(Panel):
    """Shares of groups with equal rewards and of groups left out, and the outcomes of all drawn prompts."""

    title = "Groups"
    order = 200

    def render(self, record: RunRecord) -> str | None:
        steps, equal = record.series("groups/zero_variance")
        if not steps:
            return None
        traces = one_of_several("equal rewards", steps, equal, "--series-2", hovertemplate="%{y:.1%}")
        left_out = {
            int(metrics["step"]): metrics["groups/filtered"] / metrics["groups/drawn"]
            for metrics in record.metrics
            if metrics.get("groups/drawn", 0) > 0 and "groups/filtered" in metrics
        }
        if any(left_out.values()):
            points = [*left_out], [*left_out.values()]
            traces += one_of_several("left out", *points, "--series-8", hovertemplate="%{y:.1%}")
        plot = step_figure(traces, "Share of groups", label="Groups over steps", **_SHARE)
        return block(caption(_fates(record)), plot, _reasons(record))


class ResponsesPanel(Panel):
    """Lengths of responses, and shares of the reasons why they ended."""

    title = "Responses"
    order = 210

    def render(self, record: RunRecord) -> str | None:
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
    """Draw a band of one standard deviation around the mean. Mean and deviation are smoothed in the same way."""
    lines = [metrics for metrics in record.metrics if REWARD in metrics and "reward/std" in metrics]
    if len(lines) < 2:
        return []
    means, deviations = (moving_means([float(metrics[name]) for metrics in lines]) for name in (REWARD, "reward/std"))
    low, high = ([mean + sign * std for mean, std in zip(means, deviations, strict=True)] for sign in (-1, 1))
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
    """Draw the unweighted reward terms. Terms of held-out prompts are dashed."""
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
    """Return the name of an evaluation as a legend shows it."""
    return prefix.removeprefix("eval/").rstrip("/") or "held-out"


def _fates(record: RunRecord) -> str:
    """Describe how many of the drawn prompts were trained on, left out or given up."""
    words = {"filtered": "left out for equal rewards", "quarantined": "given up", "retries": "attempts made again"}
    totals = {name: sum(record.series(f"groups/{name}")[1]) for name in ("drawn", "refill_missing", *words)}
    _, equal = record.series("groups/zero_variance")
    head = f"Mean {sum(equal) / len(equal):.1%} of groups with equal rewards"
    if not totals["drawn"]:
        return head
    trained = totals["drawn"] - totals["filtered"] - totals["quarantined"]
    parts = [f"{trained:,.0f} trained on"]
    if totals["refill_missing"]:
        parts[0] += f" ({totals['refill_missing']:,.0f} of them in spite of equal rewards)"
    parts += [f"{totals[name]:,.0f} {outcome}" for name, outcome in words.items() if totals[name]]
    return f"{head}. Of {totals['drawn']:,.0f} prompts drawn: {', '.join(parts)}"


def _reasons(record: RunRecord) -> str:
    """List why prompts were given up. The list exists only after the end of the run."""
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
            label, color = _ending(reason)
            traces += one_of_several(label, *record.series(f"response/length_{reason}"), color)
    return step_figure(traces, "Tokens", label="Response lengths over steps", rangemode="tozero", tickformat="~s")


def _ending_plot(record: RunRecord, reasons: Sequence[str]) -> str:
    """Draw the share of turns for each reason. If a step recorded no share for a reason, the share was 0."""
    lines = [metrics for metrics in record.metrics if "response/length" in metrics]
    steps = [int(metrics["step"]) for metrics in lines]
    traces: list[Trace] = []
    for reason in reasons:
        shares = [float(metrics.get(f"response/share_{reason}", 0.0)) for metrics in lines]
        label, color = _ending(reason)
        traces += one_of_several(label, steps, shares, color, hovertemplate="%{y:.1%}")
    return step_figure(traces, "Share of turns", label="How turns ended, over steps", **_SHARE)


def _ending(reason: str) -> tuple[str, str]:
    return _ENDINGS.get(reason, (reason.replace("_", " "), "--series-8"))


class PolicyPanel(Panel):
    """Entropy, clipping, KL, ratios to other policies, advantages and the critic, without plots that show nothing."""

    title = "Policy"
    order = 220

    def render(self, record: RunRecord) -> str | None:
        plots = [
            _lines(record, {"policy/entropy": "entropy"}, "Entropy (nats per token)", rangemode="tozero"),
            _token_shares(record, "policy/clip_fraction_", "Clip fractions over steps", kind="clipped: "),
            _lines(record, _KL, "KL (nats per token)", rangemode="tozero"),
            *(
                _ratios(record, [f"policy/{name}{end}" for end in ("/min", "", "/max")], f"Ratio per {unit}")
                for name, unit in (("ratio", "token"), ("sequence_ratio", "sequence"))
            ),
            _advantages(record),
            _lines(record, _CRITIC, "Critic"),
        ]
        shown = [plot for plot in plots if plot]
        return block(columns(*shown), wide=True) if shown else None


class MismatchPanel(Panel):
    """Differences between the trainer's logprobs before an update and the logprobs of the engine that sampled."""

    title = "Mismatch of rollout and trainer"
    order = 230

    def render(self, record: RunRecord) -> str | None:
        steps, differences = record.series("mismatch/logprob_diff")
        if not steps:
            return None
        fresh = set(_fresh_steps(record))
        of_fresh = [value for step, value in zip(steps, differences, strict=True) if step in fresh]
        of_fresh += record.series("mismatch/fresh")[1]
        of_older = [value for step, value in zip(steps, differences, strict=True) if step not in fresh]
        _, factors = record.series("correction/factor")
        heads: list[str] = []
        if of_fresh:
            heads.append(
                f"{_mean_and_largest(of_fresh)} on tokens of the current weights (usually below 0.00001 if "
                "trainer and engine compute in fp32, and 0.0005 to 0.03 in bf16)"
            )
        if of_older:
            heads.append(
                f"{_mean_and_largest(of_older)} on tokens of older weights, which includes the change of the "
                "policy itself (drift) and grows with their age. Only a jump among steps of the same age is a problem"
            )
        if factors:
            heads.append(f"Mean correction factor {score(sum(factors) / len(factors))}")
        percentiles = [f"mismatch/ratio_p{percent}" for percent in (1, 50, 99)]
        plots = [
            _differences(record),
            _ratios(record, percentiles, "Trainer / rollout", ("1st to 99th percentile", "median")),
            _token_shares(record, "correction/", "Corrected tokens over steps", without="correction/factor"),
        ]
        return block(caption(". ".join(heads)), columns(*filter(None, plots)), wide=True)


def _fresh_steps(record: RunRecord) -> list[int]:
    """Return the steps whose tokens were all sampled with the weights that the step then updated."""
    ages = dict(zip(*record.series("staleness/mean"), strict=True))
    return [step for step in record.series("mismatch/logprob_diff")[0] if ages.get(step, 0.0) <= 0]


def _mean_and_largest(differences: Sequence[float]) -> str:
    return f"Mean difference {score(sum(differences) / len(differences))} nats, at most {score(max(differences))}"


def _ratios(
    record: RunRecord, names: Sequence[str], y_title: str, labels: tuple[str, str] = ("smallest to largest", "mean")
) -> str:
    """Draw a low, a middle and a high ratio, unless all are the same."""
    (steps, low), (_, middle), (_, high) = map(record.series, names)
    if not steps or not len(steps) == len(middle) == len(high) or max(high) - min(low) < _SAME:
        return ""
    traces = band(labels[0], steps, low, high, "--series-4")
    traces += one_of_several(labels[1], steps, middle, "--series-4")
    # Ratios that differ by a factor of more than 10 get a logarithmic axis.
    y_axis = {"type": "log"} if 0 < 10 * min(low) < max(high) else {}
    return step_figure(traces, y_title, label=f"{y_title} over steps", **y_axis)


def _advantages(record: RunRecord) -> str:
    steps, deviations = record.series("advantage/std")
    if not steps:
        return ""
    (_, low), (_, high) = record.series("advantage/min"), record.series("advantage/max")
    traces: list[Trace] = []
    if len(steps) == len(low) == len(high):
        traces += band("smallest to largest", steps, low, high, "--series-8")
    traces += one_of_several("standard deviation", steps, deviations, "--series-5")
    traces += one_of_several("mean", *record.series("advantage/mean"), "--series-1")
    return step_figure(traces, "Advantage", label="Advantages over steps")


def _differences(record: RunRecord) -> str:
    """Draw differences on a logarithmic axis, because the largest is many times the mean."""
    traces: list[Trace] = []
    for name, label, color in (
        ("mismatch/logprob_diff/max", "largest |difference|", "--series-8"),
        ("mismatch/logprob_diff", "mean |difference|", "--series-1"),
        ("mismatch/fresh", "mean of current weights", "--series-2"),
        ("mismatch/worst_engine", "mean of the worst engine", "--series-5"),
        ("mismatch/kl", "KL", "--series-3"),
    ):
        traces += one_of_several(label, *record.series(name), color) if record.series(name)[0] else []
    for trace in traces:
        # A logarithmic axis cannot show 0. Rounding makes some values negative.
        trace["y"] = [value if value > 0 else math.nan for value in trace["y"]]
    if fresh := sorted({*_fresh_steps(record), *record.series("mismatch/fresh")[0]}):
        traces.append(level(f"warning above {LARGEST_MISMATCH:g} on average", fresh, LARGEST_MISMATCH, "--series-6"))
    y_axis: dict[str, Any] = {"type": "log", "exponentformat": "power"}
    return step_figure(traces, "Nats per token", label="Logprob differences over steps", **y_axis)


def _token_shares(record: RunRecord, prefix: str, label: str, *, kind: str = "", without: str = "") -> str:
    """Draw the metrics that begin with the prefix, which are shares of tokens."""
    names = [name for name in recorded_names(record, prefix) if name != without]
    labels = {name: f"{kind}{name.removeprefix(prefix).replace('_', ' ')}" for name in names}
    y_axis = {"tickformat": ".2~%", "rangemode": "tozero"}
    return _lines(record, labels, "Share of tokens", label, hovertemplate="%{y:.2%}", **y_axis)


def _lines(
    record: RunRecord,
    labels: Mapping[str, str],
    y_title: str,
    label: str = "",
    *,
    hovertemplate: str = "%{y:.4~g}",
    **y_axis: Any,
) -> str:
    """Draw these series, except series that are always 0."""
    traces: list[Trace] = []
    for index, (name, shown) in enumerate(labels.items()):
        steps, values = record.series(name)
        if any(values):
            traces += one_of_several(shown, steps, values, series_color(index), hovertemplate=hovertemplate)
    return step_figure(traces, y_title, label=label or f"{y_title} over steps", **y_axis) if traces else ""
