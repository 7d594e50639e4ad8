"""Say in words when a run goes wrong, and what to do about it: one set of rules for terminal, summary and report.

The metrics of one step after the other go in, as in metrics.jsonl; sentences by kind of trouble come out, usually none.
`spurline_insight.rollout_health` judges what only rollouts have, and each step by itself; the rules here look at loss,
gradient, learning rate and the load of the controller, and compare a step with those before it. A policy's loss says
nothing of how training goes and is not judged.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spurline_insight.rollout_health import health_words

LEVEL_STEPS = 5
"""Steps whose median is the level of the loss: one hard batch does not move it."""
DIVERGED_BY = 1.0
"""Nats. A level this much above the best one, and at least twice as high, is no noise of batches: for a model that
predicts half of all tokens well, a nat is a factor of 2.7 in their probability."""
DIVERGED_FROM_START = 3.0
"""As many nats above the first loss, and three times as high. Until there is a level the first loss is all there is to
compare with, and a single small batch may lie far from the others."""
SPIKE_DEVIATIONS = 10.0
"""A spike is this many median absolute deviations, and DIVERGED_BY nats, above the median of the steps before."""
GRADIENT_SPIKE = 20.0
"""Times the median gradient norm of the steps before. Noise of batches rarely reaches 10."""
LARGEST_GRADIENT = 1000.0
"""Median gradient norm over LEVEL_STEPS x 2 steps. Fine-tuning shows 0.1 to 10, an untrained model tens; more means
that the loss is a sum where it should be a mean, or that weights are broken."""
GRADIENT_GROWTH = 20.0
"""Times the lowest median over as many steps, where that makes more than 10: gradients usually fall or stay."""
CLIPPED_TO = 0.1
"""Share of its length to which clipping cuts a gradient that is far too long. Norms of 1 to 5 times the threshold are
common and harmless, as AdamW does not mind their length."""
CLIPPED_SHARE = 0.95
"""Share of the last 50 steps that are clipped so far."""
STILL_STEPS = 10
"""Steps after which a loss that never changes in any digit is no coincidence."""
IDLE_STEPS = 3
"""Steps in a row without a gradient or with a learning rate of 0, which a schedule may have at its ends."""
BUSY_LOOP = 0.9
"""Share of the time that the event loop of asynchronous rollouts is busy; above it, engines wait for it."""
LASTING_SHARE = 0.1
"""Trouble of as many steps, or of the last one, belongs to how a run ended."""

_MAX_STRETCHES = 8
_HISTORY = 20
_LONG_HISTORY = 50


class HealthWatch:
    """Judges the steps of one run in order.

    config: the resolved settings; without them nothing is known of clipping.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._threshold = clip_threshold(config or {})
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._norms: deque[float] = deque(maxlen=_LONG_HISTORY)
        self._rates: deque[float] = deque(maxlen=IDLE_STEPS)
        self._loop_shares: deque[float] = deque(maxlen=LEVEL_STEPS)
        self._first_loss: float | None = None
        self._best: tuple[float, int] | None = None
        self._lowest_norm: float | None = None

    def judge(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        """A sentence or two for each thing that is off at this step, by a short name of its kind."""
        found = health_words(metrics)
        if "lr" in metrics:
            found |= dict(self._judge_rate(metrics["lr"]))
        if "grad_norm" in metrics:
            found |= dict(self._judge_gradient(metrics["grad_norm"], is_policy="reward/mean" in metrics))
        if "loss" in metrics and "reward/mean" not in metrics:
            found |= dict(self._judge_loss(step, metrics["loss"]))
        if "controller/cpu_share" in metrics:
            found |= dict(self._judge_event_loop(metrics["controller/cpu_share"]))
        if "no_learning_rate" in found or "no_gradient" in found:
            found.pop("still_loss", None)
        return found

    def _judge_loss(self, step: int, loss: float) -> Iterator[tuple[str, str]]:
        before = list(self._losses)
        self._losses.append(loss)
        self._first_loss = loss if self._first_loss is None else self._first_loss
        level = statistics.median([*before, loss][-LEVEL_STEPS:])
        reference = min(self._best or (self._first_loss, 1), (self._first_loss, 1))
        far = self._first_loss + max(DIVERGED_FROM_START, 2 * abs(self._first_loss))
        if self._best is not None:
            far = min(far, self._best[0] + max(DIVERGED_BY, abs(self._best[0])))
        if before and level > far:
            yield (
                "diverged",
                f"The loss is at {level:.4g} and was at {reference[0]:.4g} around step {reference[1]:,}: training has "
                "diverged, or the data has become much harder. Lower optimizer.learning_rate, set "
                "schedule.warmup_steps, and go on from a checkpoint before that.",
            )
        elif self._is_spike(before, loss):
            yield (
                "loss_spike",
                f"The loss jumps to {loss:.4g} after {statistics.median(before):.4g}. Once, it is a batch of unusual "
                "rows; when it comes again, lower optimizer.learning_rate or optimizer.max_grad_norm.",
            )
        if len(before) + 1 >= STILL_STEPS and len({*before[1 - STILL_STEPS :], loss}) == 1:
            yield (
                "still_loss",
                f"The loss has been exactly {loss:.6g} for {STILL_STEPS} steps: what is trained has no effect on it. "
                "Check that the trained weights are part of the model, and that the loss reads its logprobs.",
            )
        if len(self._losses) >= LEVEL_STEPS and (self._best is None or level < self._best[0]):
            self._best = (level, step)

    @staticmethod
    def _is_spike(before: list[float], loss: float) -> bool:
        if len(before) < 2 * LEVEL_STEPS:
            return False
        middle = statistics.median(before)
        deviation = statistics.median([abs(value - middle) for value in before])
        return loss - middle > max(DIVERGED_BY, SPIKE_DEVIATIONS * deviation)

    def _judge_gradient(self, norm: float, *, is_policy: bool) -> Iterator[tuple[str, str]]:
        before = list(self._norms)
        self._norms.append(norm)
        recent = [*before, norm][-2 * LEVEL_STEPS :]
        if is_policy:
            # Groups of equal rewards have none, and the rules on rollouts say so.
            return
        if len(recent) >= IDLE_STEPS and not any(recent[-IDLE_STEPS:]):
            yield (
                "no_gradient",
                "The gradient is 0, so nothing is learned. All weights may be frozen, no token may carry loss, or the "
                "loss is where it cannot fall any further.",
            )
        if len(recent) < 2 * LEVEL_STEPS:
            return
        level = statistics.median(recent)
        if level > LARGEST_GRADIENT:
            yield (
                "huge_gradient",
                f"The gradient norm is around {level:.3g}, where fine-tuning shows 0.1 to 10. Check the reduction of "
                "the loss, the precision and the weights; clipping shortens the step, but the direction stays wrong.",
            )
        elif self._lowest_norm is not None and level > max(10.0, GRADIENT_GROWTH * self._lowest_norm):
            yield (
                "growing_gradient",
                f"The gradient norm has grown from {self._lowest_norm:.3g} to {level:.3g}, which comes before a "
                "divergence. Lower optimizer.learning_rate.",
            )
        usual = statistics.median(before[-_HISTORY:])
        advice = "; clipping has bounded the step." if self._threshold else ", and set optimizer.max_grad_norm."
        if norm > GRADIENT_SPIKE * usual and norm > 10 * (self._threshold or 1.0):
            yield (
                "gradient_spike",
                f"The gradient norm jumps to {norm:.3g} after {usual:.3g}. Look at the rows of this step{advice}",
            )
        if self._is_clipped_hard():
            yield (
                "clipped",
                f"Clipping cuts nearly every gradient to less than {CLIPPED_TO:.0%} of its length (norm around "
                f"{level:.3g}, optimizer.max_grad_norm {self._threshold:g}). Raise that, or look for what makes "
                "gradients so long.",
            )
        self._lowest_norm = level if self._lowest_norm is None else min(level, self._lowest_norm)

    def _is_clipped_hard(self) -> bool:
        if self._threshold is None or len(self._norms) < _LONG_HISTORY:
            return False
        return sum(norm * CLIPPED_TO > self._threshold for norm in self._norms) >= CLIPPED_SHARE * len(self._norms)

    def _judge_rate(self, rate: float) -> Iterator[tuple[str, str]]:
        self._rates.append(rate)
        if len(self._rates) == IDLE_STEPS and not any(self._rates):
            yield (
                "no_learning_rate",
                "The learning rate is 0, so the weights stay as they are. Set optimizer.learning_rate, or a schedule "
                "that does not end at 0 before the run does.",
            )

    def _judge_event_loop(self, share: float) -> Iterator[tuple[str, str]]:
        self._loop_shares.append(share)
        level = statistics.median(self._loop_shares)
        if len(self._loop_shares) == LEVEL_STEPS and level > BUSY_LOOP:
            yield (
                "busy_controller",
                f"The event loop that all rollouts pass through is busy for {level:.0%} of the time, so that engines "
                "wait for it. Have engines send their tokens from processes of their own (source.engine.placement: "
                "ray, or engine child_process), and environments and rewards compute in "
                "spurline_rl.concurrency.in_thread.",
            )


@dataclass(frozen=True)
class Finding:
    """One kind of trouble in a run.

    words: of the last step that had it. places: the steps that had it, as indices into the lines, ascending. lasts:
    whether it belongs to how the run ended, and did not just pass by.
    """

    kind: str
    words: str
    places: tuple[int, ...]
    lasts: bool

    def when(self, steps: Sequence[int]) -> str:
        """`Steps 3 to 7, 12 (6 of 60)`. steps: `trained_steps` of the lines that were judged."""
        places = self.places
        if len(places) == len(steps):
            return "Every step" if len(steps) > 1 else f"Step {steps[0]:,}"
        stretches: list[list[int]] = []
        for place in places:
            if stretches and place == stretches[-1][1] + 1:
                stretches[-1][1] = place
            else:
                stretches.append([place, place])
        ends = [(f"{steps[first]:,}", f"{steps[last]:,}") for first, last in stretches[:_MAX_STRETCHES]]
        shown = [first if first == last else f"{first} to {last}" for first, last in ends]
        more = f" and later, last {steps[places[-1]]:,}" if len(stretches) > _MAX_STRETCHES else ""
        noun = "Step" if len(places) == 1 else "Steps"
        return f"{noun} {', '.join(shown)}{more} ({len(places):,} of {len(steps):,})"


def trained_steps(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """The steps of lines of metrics.jsonl, less step 0, in which nothing is trained and so nothing can be off."""
    return [int(line["step"]) for line in lines if line["step"]]


def findings(lines: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    """What was off in a run, the most frequent first. lines: of metrics.jsonl. config: the resolved settings."""
    lines = [line for line in lines if line["step"]]
    watch = HealthWatch(config)
    places: dict[str, list[int]] = {}
    latest: dict[str, str] = {}
    for place, metrics in enumerate(lines):
        for kind, words in watch.judge(int(metrics["step"]), metrics).items():
            places.setdefault(kind, []).append(place)
            latest[kind] = words
    found = [
        Finding(kind, latest[kind], tuple(at), at[-1] == len(lines) - 1 or len(at) >= LASTING_SHARE * len(lines))
        for kind, at in places.items()
    ]
    return sorted(found, key=lambda finding: -len(finding.places))


def clip_threshold(config: Mapping[str, Any]) -> float | None:
    """`optimizer.max_grad_norm` of the resolved settings; None where gradients are not clipped."""
    optimizer = config.get("optimizer")
    threshold = optimizer.get("max_grad_norm") if isinstance(optimizer, Mapping) else None
    return float(threshold) if threshold is not None else None
