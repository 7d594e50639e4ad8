"""Say in words when a run goes wrong, and what to do about it: one set of rules for terminal, summary and report.

The metrics of one step after the other go in, as in metrics.jsonl; sentences by kind of trouble come out, usually
none. `health_words` judges rollouts, each step by itself. The other rules look at loss, gradient, learning rate and the
load of the controller, and compare a step with those before it. They do not judge the loss of a policy, which does not
show whether training works. A `Watcher` warns at each step, and at the end of the run.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spurline.plugins import hookimpl
from spurline.plugins.run_view import RunView, Warned
from spurline.trackers.jsonl import read_metrics

LEVEL_STEPS = 5
"""Steps whose median is the level of the loss, which one hard batch does not move."""
DIVERGED_BY = 1.0
"""Nats above the best level, and at least twice as high: a nat is a factor of 2.7 in the probability of tokens, which
is no noise of batches."""
DIVERGED_FROM_START = 3.0
"""Nats above the first loss, and three times as high. Until there is a level, only the first loss can be compared with,
and a single small batch may lie far from the others."""
SPIKE_DEVIATIONS = 10.0
"""A spike is this many median absolute deviations, and DIVERGED_BY nats, above the median of the steps before."""
GRADIENT_SPIKE = 20.0
"""Times the median gradient norm of the steps before. Noise of batches rarely reaches 10."""
LARGEST_GRADIENT = 1000.0
"""Median gradient norm over LEVEL_STEPS x 2 steps. Fine-tuning shows 0.1 to 10, an untrained model tens; more means
that the loss is a sum where it should be a mean, or that weights are broken."""
IDLE_STEPS = 3
"""Steps in a row without a gradient or with a learning rate of 0, which a schedule may have at its ends."""
BUSY_LOOP = 0.9
"""Share of time above which a busy event loop of asynchronous rollouts makes engines wait."""
LASTING_SHARE = 0.1
"""Share of steps with a trouble that makes it belong to how a run ended; the last step does too."""

_HISTORY = 20

LARGEST_MISMATCH = 0.05
"""Mean |trainer - rollout| logprob in nats. Engines of another precision or kernel show 0.01 to 0.03 (TIS, Yao et al.
2025); above this, ratios are wrong rather than noisy."""
LARGEST_CLIPPED = 0.3
"""Share of tokens. Clipped PPO runs mostly show 0.01 to 0.1, GSPO about 0.15 (Zheng et al. 2025)."""
LARGEST_KL_OLD = 0.1
"""Nats per token between the policy before and during one step. PPO's usual stopping rule is 0.01 to 0.03."""
LARGEST_CUT_SHARE = 0.3
"""Share of turns that end at the token limit."""
LARGEST_FAILED_SHARE = 0.05
"""Share of turns that end with an abort or an error."""
LARGEST_REJECTED_SHARE = 0.3
"""Share of tokens that a correction leaves out."""
_NO_ADVANTAGE = 1e-6
"""Advantages this small are rounding."""


class HealthWatch:
    """Judges the steps of one run in order.

    Args:
        config: The resolved settings; without them, the rules assume that gradients are not clipped.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._threshold = clip_threshold(config or {})
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._norms: deque[float] = deque(maxlen=_HISTORY)
        self._rates: deque[float] = deque(maxlen=IDLE_STEPS)
        self._loop_shares: deque[float] = deque(maxlen=LEVEL_STEPS)
        self._first_loss: float | None = None
        self._best: tuple[float, int] | None = None

    def judge(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return a sentence or two about each trouble at this step, by a short name of its kind."""
        found = health_words(metrics)
        if "lr" in metrics:
            found |= dict(self._judge_rate(metrics["lr"]))
        if "grad_norm" in metrics:
            found |= dict(self._judge_gradient(metrics["grad_norm"], is_policy="reward/mean" in metrics))
        if "loss" in metrics and "reward/mean" not in metrics:
            found |= dict(self._judge_loss(step, metrics["loss"]))
        if "controller/cpu_share" in metrics:
            found |= dict(self._judge_event_loop(metrics["controller/cpu_share"]))
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
            # Groups of equal rewards have no gradient, and the rules on rollouts report them.
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
        usual = statistics.median(before)
        advice = "; clipping has bounded the step." if self._threshold else ", and set optimizer.max_grad_norm."
        if norm > GRADIENT_SPIKE * usual and norm > 10 * (self._threshold or 1.0):
            yield (
                "gradient_spike",
                f"The gradient norm jumps to {norm:.3g} after {usual:.3g}. Look at the rows of this step{advice}",
            )

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
    """One kind of trouble in a run."""

    kind: str
    words: str
    """The sentences of the last step that had it."""
    places: tuple[int, ...]
    """The steps that had it, as ascending indices into the lines."""
    lasts: bool
    """The trouble belongs to how the run ended, and did not just pass by."""

    def when(self, steps: Sequence[int]) -> str:
        """Return `Steps 3 to 12 (6 of 60)`, given the `trained_steps` of the lines that were judged."""
        places = self.places
        if len(places) == len(steps):
            return "Every step" if len(steps) > 1 else f"Step {steps[0]:,}"
        first, last = (f"{steps[place]:,}" for place in (places[0], places[-1]))
        shown = f"Step {first}" if len(places) == 1 else f"Steps {first} to {last}"
        return f"{shown} ({len(places):,} of {len(steps):,})"


def trained_steps(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the steps of lines of metrics.jsonl without step 0, in which nothing is trained."""
    return [int(line["step"]) for line in lines if line["step"]]


def findings(lines: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    """Return the troubles of a run, the most frequent first.

    Args:
        lines: Lines of metrics.jsonl.
        config: The resolved settings.
    """
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
    """Return `optimizer.max_grad_norm` of the resolved settings; None where gradients are not clipped."""
    optimizer = config.get("optimizer")
    threshold = optimizer.get("max_grad_norm") if isinstance(optimizer, Mapping) else None
    return float(threshold) if threshold is not None else None


class Watcher:
    """Warns about trouble at each step of a run, and reports the trouble of the whole run at its end."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._config = run.loaded.resolved()
        self._health = HealthWatch(self._config)
        if run.state.checkpoint is not None:
            # New steps are compared with those before the resume.
            for metrics in read_metrics(run.directory.metrics, skip_foreign=True):
                if metrics["step"] <= run.state.step:
                    self._health.judge(int(metrics["step"]), metrics)

    @classmethod
    def attach(cls, run: RunView) -> None:
        """Let a watcher judge the steps of this run until it ends."""
        watcher = cls(run)
        run.loaded.host.attach(watcher, "insight/health")
        run.add_judge(watcher.warnings)

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        for kind, words in self._health.judge(step, metrics).items():
            self._run.warn(step, kind, words)

    def warnings(self) -> Sequence[Warned]:
        """Return the troubles of the whole run, with their steps."""
        lines = read_metrics(self._run.directory.metrics, skip_foreign=True)
        steps = trained_steps(lines)
        found = findings(lines, self._config)
        return [Warned(each.kind, f"{each.words} {each.when(steps)}.", each.lasts) for each in found]


def health_words(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return a sentence or two about each trouble with the rollouts, by a short name of its kind."""
    return dict(_judged(metrics))


def _judged(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    difference = metrics.get("mismatch/logprob_diff", 0.0)
    # Logprobs of tokens from older weights are expected to differ.
    if difference > LARGEST_MISMATCH and metrics.get("staleness/mean", 0.0) <= 0:
        # A run with a correction needs no advice to set one.
        correct = "" if "correction/factor" in metrics else ", or set source.correction"
        yield (
            "mismatch",
            f"Rollout and trainer logprobs differ by {difference:.3f} nats on average: the engine does not compute "
            f"what is trained. Check that both use the same weights, precision and temperature{correct}.",
        )
    largest = max(abs(metrics.get("advantage/max", 0.0)), abs(metrics.get("advantage/min", 0.0)))
    # In groups of one sample, or with a critic, equal rewards may have advantages other than 0.
    if metrics.get("groups/zero_variance", 0.0) >= 1 and largest <= _NO_ADVANTAGE:
        yield (
            "equal_rewards",
            "All groups have equal rewards, so nothing is learned in this step. The task is too easy or too hard for "
            "the model, or the reward does not tell answers apart: look at the sample answers.",
        )
    if (missing := metrics.get("groups/refill_missing", 0.0)) > 0:
        yield (
            "refill_missing",
            f"{_count(missing, 'group')} with equal rewards had to be trained on, as the step's limit of draws was "
            "reached before enough others were found. Raise source.max_draws_per_step, or choose prompts that the "
            "model solves sometimes.",
        )
    if (given_up := metrics.get("groups/quarantined", 0.0)) > 0:
        yield (
            "given_up",
            f"{_count(given_up, 'prompt')} had to be given up in this step, as attempts failed and so did their "
            "retries. The run stops once it has given up more different prompts than source.faults.max_quarantined.",
        )
    clipped = metrics.get("policy/clip_fraction_low", 0.0) + metrics.get("policy/clip_fraction_high", 0.0)
    distance = metrics.get("policy/kl_old", 0.0)
    if clipped > LARGEST_CLIPPED or distance > LARGEST_KL_OLD:
        found = (
            f"{clipped:.0%} of tokens are clipped"
            if clipped > LARGEST_CLIPPED
            else f"The policy moves {distance:.2g} nats per token away from where the step began"
        )
        yield (
            "large_update",
            f"{found}: the updates of one step are too large. Lower optimizer.learning_rate, or take fewer "
            "optimizer steps per batch (minibatches.update_epochs, minibatches.prompts_per_minibatch).",
        )
    if (cut_off := metrics.get("response/share_length", 0.0)) > LARGEST_CUT_SHARE:
        yield (
            "cut_off",
            f"{cut_off:.0%} of responses were cut off at the token limit. Raise source.sampling.max_new_tokens, or "
            "make the model stop earlier, as source.overlong does.",
        )
    failed = metrics.get("response/share_abort", 0.0) + metrics.get("response/share_error", 0.0)
    if failed > LARGEST_FAILED_SHARE:
        yield (
            "failed_turns",
            f"{failed:.0%} of responses ended with an abort or an error of the engine. Look at the engine's own log.",
        )
    if (rejected := metrics.get("correction/rejected", 0.0)) > LARGEST_REJECTED_SHARE:
        yield (
            "rejected",
            f"The correction leaves out {rejected:.0%} of tokens, which are generated in vain. Make engine and trainer "
            "agree better, or widen the band of source.correction.",
        )


def _count(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"
