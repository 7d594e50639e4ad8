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
_REASONS = {"stop": "stopped", "length": "cut off at the limit", "abort": "aborted", "error": "failed"}
_PROMPTS_SHOWN = 10
_CLIPPED = "policy/clip_fraction_"
_KL = {"policy/kl_old": "before the update", "policy/kl_reference": "reference model"}
_CRITIC = {"value/predicted": "predicted", "value/return": "return"}
_CORRECTED = "correction/"
_SAME = 1e-4
"""Ratios that differ by less than this number differ only by rounding."""


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
        plot = step_figure(traces, "Share of groups", label="Groups over steps", tickformat=".0%", range=[-0.02, 1.02])
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
            points = record.series(f"response/length_{reason}")
            traces += one_of_several(_ending(reason), *points, _ending_color(reason))
    return step_figure(traces, "Tokens", label="Response lengths over steps", rangemode="tozero", tickformat="~s")


def _ending_plot(record: RunRecord, reasons: Sequence[str]) -> str:
    """Draw the share of turns for each reason. If a step recorded no share for a reason, the share was 0."""
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


class PolicyPanel(Panel):
    """Entropy, clipping, KL and ratios to other policies, and the spread of advantages."""

    title = "Policy"
    order = 220

    def render(self, record: RunRecord) -> str | None:
        notes: list[str] = []
        plots = [
            _entropy(record),
            _clipping(record, notes),
            _lines(record, _KL, "KL (nats per token)", rangemode="tozero"),
            _ratio(record, "policy/ratio", "Ratio per token", notes),
            _ratio(record, "policy/sequence_ratio", "Ratio per sequence", notes),
            _advantages(record),
            _lines(record, _CRITIC, "Critic"),
        ]
        shown = [plot for plot in plots if plot]
        if not shown and not notes:
            return None
        head = caption("; ".join(notes).capitalize()) if notes else ""
        return block(head, columns(*shown), wide=True)


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
        heads: list[str] = []
        if of_fresh:
            heads.append(
                f"{_mean_and_largest(of_fresh)} on tokens of the current weights; engines of another precision show "
                "0.01 to 0.03"
            )
        if of_older:
            heads.append(
                f"{_mean_and_largest(of_older)}, with tokens of older weights, which includes the change of the "
                "policy itself (drift)"
            )
        _, factors = record.series("correction/factor")
        if factors:
            heads.append(f"mean correction factor {score(sum(factors) / len(factors))}")
        head = caption("; ".join(heads))
        plots = [plot for plot in (_differences(record), _percentiles(record), _corrections(record)) if plot]
        return block(head, columns(*plots), wide=True) if len(plots) > 1 else block(head, *plots)


def _fresh_steps(record: RunRecord) -> list[int]:
    """Return the steps whose tokens were all sampled with the weights that the step then updated."""
    ages = dict(zip(*record.series("staleness/mean"), strict=True))
    return [step for step in record.series("mismatch/logprob_diff")[0] if ages.get(step, 0.0) <= 0]


def _mean_and_largest(differences: Sequence[float]) -> str:
    return f"Mean difference {score(sum(differences) / len(differences))} nats, at most {score(max(differences))}"


def _entropy(record: RunRecord) -> str:
    steps, values = record.series("policy/entropy")
    if not steps:
        return ""
    traces = raw_and_smoothed("entropy", steps, values, "--series-3")
    return step_figure(traces, "Entropy (nats per token)", label="Entropy over steps", rangemode="tozero")


def _clipping(record: RunRecord, notes: list[str]) -> str:
    """Draw shares of clipped tokens, or add to `notes` that no token was clipped."""
    names = recorded_names(record, _CLIPPED)
    if not names:
        return ""
    if not any(any(record.series(name)[1]) for name in names):
        notes.append("no token was clipped")
        return ""
    labels = {name: f"clipped: {name.removeprefix(_CLIPPED)}" for name in names}
    return _token_shares(record, labels, "Clip fractions over steps")


def _ratio(record: RunRecord, name: str, y_title: str, notes: list[str]) -> str:
    """Draw the mean, the smallest and the largest ratio, or add to `notes` that the ratio is always 1."""
    (steps, means), (_, low), (_, high) = (record.series(name + suffix) for suffix in ("", "/min", "/max"))
    if not steps or not len(steps) == len(low) == len(high):
        return ""
    if max(high) - min(low) < _SAME:
        notes.append(f"{y_title.lower()} to the policy before the update is 1 throughout: one update per step")
        return ""
    traces = band("smallest to largest", steps, low, high, "--series-4")
    traces += one_of_several("mean", steps, means, "--series-4")
    return step_figure(traces, y_title, label=f"{y_title} to the policy before the update", **_log_if(low, high))


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


def _lines(record: RunRecord, labels: Mapping[str, str], y_title: str, **y_axis: Any) -> str:
    """Draw these series, except series that are always 0."""
    traces: list[Trace] = []
    for index, (name, label) in enumerate(labels.items()):
        steps, values = record.series(name)
        if any(values):
            traces += one_of_several(label, steps, values, series_color(index))
    return step_figure(traces, y_title, label=f"{y_title} over steps", **y_axis) if traces else ""


def _differences(record: RunRecord) -> str:
    """Draw differences on a logarithmic axis, because the largest is many times the mean."""
    traces: list[Trace] = []
    for name, label, color in (
        ("mismatch/logprob_diff/max", "largest |difference|", "--series-8"),
        ("mismatch/logprob_diff", "mean |difference|", "--series-1"),
        ("mismatch/kl", "KL", "--series-3"),
    ):
        traces += one_of_several(label, *record.series(name), color)
    for trace in traces:
        # A logarithmic axis cannot show 0. Rounding makes some values negative.
        trace["y"] = [value if value > 0 else math.nan for value in trace["y"]]
    if fresh := _fresh_steps(record):
        traces.append(level(f"warning above {LARGEST_MISMATCH:g} on average", fresh, LARGEST_MISMATCH, "--series-6"))
    y_axis: dict[str, Any] = {"type": "log", "exponentformat": "power"}
    return step_figure(traces, "Nats per token", label="Logprob differences over steps", **y_axis)


def _percentiles(record: RunRecord) -> str:
    (steps, low), (_, middle), (_, high) = (record.series(f"mismatch/ratio_p{name}") for name in (1, 50, 99))
    if not steps or not len(steps) == len(middle) == len(high) or max(high) - min(low) < _SAME:
        return ""
    traces = band("1st to 99th percentile", steps, low, high, "--series-4")
    traces.append(line("median", steps, middle, "--series-4"))
    return step_figure(traces, "Trainer / rollout", label="Importance ratio over steps", **_log_if(low, high))


def _corrections(record: RunRecord) -> str:
    names = [name for name in recorded_names(record, _CORRECTED) if name != "correction/factor"]
    labels = {name: name.removeprefix(_CORRECTED).replace("_", " ") for name in names}
    return _token_shares(record, labels, "Corrected tokens over steps") if names else ""


def _token_shares(record: RunRecord, labels: Mapping[str, str], label: str) -> str:
    traces: list[Trace] = []
    for index, (name, shown) in enumerate(labels.items()):
        traces += one_of_several(shown, *record.series(name), series_color(index), hovertemplate="%{y:.2%}")
    return step_figure(traces, "Share of tokens", label=label, tickformat=".2~%", rangemode="tozero")


def _log_if(low: Sequence[float], high: Sequence[float]) -> dict[str, Any]:
    """Return the settings of a logarithmic axis if the ratios differ by a factor of more than 10."""
    if min(low) <= 0 or max(high) <= 10 * min(low):
        return {}
    return {"type": "log"}
