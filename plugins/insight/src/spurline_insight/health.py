"""Find problems of a run in its metrics, and advise what to do. Terminal, summary and report share these rules.

`health_words` judges the rollouts of one step. `HealthWatch` also judges loss, gradient, learning rate and the load of
the controller, and compares a step with earlier steps. Neither judges the loss of a policy, since that loss does not
show whether training works. A `Watcher` warns after each step, and at the end of the run.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spurline.plugins import hookimpl
from spurline.plugins.run_view import RunView, Warned
from spurline.trackers.jsonl import read_metrics
from spurline_insight.report.record import setting

LEVEL_STEPS = 5
"""The level of the loss is its median over this many steps. A single hard batch does not change this median."""
DIVERGED_BY = 1.0
"""A loss has diverged if its level is at least twice the best level, and this many nats above it. One nat is a factor
of 2.7 in the probability of a token. Batches differ by less."""
DIVERGED_FROM_START = 3.0
"""A loss has also diverged if it is at least three times the first loss, and this many nats above it. This limit is
higher than DIVERGED_BY, since the first batch may differ much from the others."""
SPIKE_DEVIATIONS = 10.0
"""A loss is a spike if it is above the median of the steps before by more than this many median absolute deviations,
and by more than DIVERGED_BY nats."""
GRADIENT_SPIKE = 20.0
"""A norm is a spike if it is more than this many times the median norm of the steps before, and more than 10 times the
clipping threshold. Norms of usual batches rarely differ by a factor of 10."""
LARGEST_GRADIENT = 1000.0
"""Limit of the median gradient norm over 2 x LEVEL_STEPS steps. Fine-tuning has norms of 0.1 to 10, an untrained model
up to 100. A larger norm means that the loss is a sum instead of a mean, or that weights are broken."""
IDLE_STEPS = 3
"""A gradient or learning rate of 0 is a problem if it lasts this many steps. Schedules may have 1 or 2 steps with 0."""
BUSY_LOOP = 0.9
"""If the event loop of asynchronous rollouts is busy for more than this share of time, engines wait for it."""
LASTING_SHARE = 0.1
"""A problem counts as lasting if at least this share of all steps has it, or if the last step has it."""

_HISTORY = 20

LARGEST_MISMATCH = 0.05
"""Limit of the mean |trainer - rollout| logprob in nats. Engines with another precision or kernel have 0.01 to 0.03
(TIS, Yao et al. 2025)."""
MISMATCH_JUMP = 5.0
"""A mean |trainer - rollout| is a jump if it is more than this many times the median of earlier steps whose tokens had
about the same mean age, or if tokens of one engine have this many times the mean of the other engines."""
LEAST_JUMP = 0.01
"""A jump to fewer nats is not a problem: it changes importance ratios by less than 1 %."""
_SAME_AGE = 0.5
"""Mean ages are compared if they differ by at most this share of the later one, or by this many updates if it is above
1. The mismatch of tokens grows with their age, and those of age 0 show only rounding."""
LARGEST_CLIPPED = 0.3
"""Limit of the share of clipped tokens. PPO mostly shows 0.01 to 0.1, GSPO about 0.15 (Zheng et al. 2025)."""
LARGEST_KL_OLD = 0.1
"""Limit of the KL divergence in one step, in nats per token. PPO usually stops a step at 0.01 to 0.03."""
LARGEST_CUT_SHARE = 0.3
"""Limit of the share of turns that end at the token limit."""
LARGEST_FAILED_SHARE = 0.05
"""Limit of the share of turns that end with an abort or an error."""
LARGEST_UNPARSED_SHARE = 0.05
"""Limit of the share of tool calls that cannot be read. Models that know their format write almost none."""
LARGEST_REJECTED_SHARE = 0.3
"""Limit of the share of tokens that a correction leaves out."""
LARGEST_UNKNOWN_SUPPORT = 0.01
"""Limit of the share of tokens without loss because more tokens tied at `top_k` than there is room for."""
_NO_ADVANTAGE = 1e-6
"""Smaller advantages are rounding errors."""


class HealthWatch:
    """Judges the steps of one run in order. `config` has the resolved settings of the run."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._threshold = clip_threshold(config)
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._norms: deque[float] = deque(maxlen=_HISTORY)
        self._rates: deque[float] = deque(maxlen=IDLE_STEPS)
        self._loop_shares: deque[float] = deque(maxlen=LEVEL_STEPS)
        # The mean age of the tokens, and their mismatch.
        self._mismatches: dict[str, deque[tuple[float, float]]] = {}
        self._first_loss: float | None = None
        self._best: tuple[float, int] | None = None

    def judge(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return the problems of this step. Keys are short names, and values are one or two sentences."""
        found = health_words(metrics)
        if "lr" in metrics:
            found |= dict(self._judge_rate(metrics["lr"]))
        if "grad_norm" in metrics:
            found |= dict(self._judge_gradient(metrics["grad_norm"], is_policy="reward/mean" in metrics))
        if "loss" in metrics and "reward/mean" not in metrics:
            found |= dict(self._judge_loss(step, metrics["loss"]))
        age = metrics.get("staleness/mean", 0.0)
        for name, mean_age in (("mismatch/logprob_diff", age), ("mismatch/fresh", 0.0)):
            if name in metrics:
                found |= dict(self._judge_mismatch(name, mean_age, metrics[name]))
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
                "schedule.warmup_steps, and continue from an earlier checkpoint.",
            )
        elif self._is_spike(before, loss):
            yield (
                "loss_spike",
                f"The loss jumps to {loss:.4g} after {statistics.median(before):.4g}. A single jump may come from "
                "unusual rows. If it happens again, lower optimizer.learning_rate or optimizer.max_grad_norm.",
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
            # Groups with equal rewards have no gradient. `health_words` reports them.
            return
        if len(recent) >= IDLE_STEPS and not any(recent[-IDLE_STEPS:]):
            yield (
                "no_gradient",
                "The gradient is 0, so nothing is learned. Perhaps all weights are frozen, no token has loss, or the "
                "loss has reached its minimum.",
            )
        if len(recent) < 2 * LEVEL_STEPS:
            return
        level = statistics.median(recent)
        if level > LARGEST_GRADIENT:
            yield (
                "huge_gradient",
                f"The gradient norm is around {level:.3g}. Fine-tuning usually has norms of 0.1 to 10. Check the "
                "reduction of the loss, the precision and the weights. Clipping makes the step shorter, not correct.",
            )
        usual = statistics.median(before)
        advice = "Clipping has limited the step." if self._threshold else "Set optimizer.max_grad_norm."
        if norm > GRADIENT_SPIKE * usual and norm > 10 * (self._threshold or 1.0):
            yield (
                "gradient_spike",
                f"The gradient norm jumps to {norm:.3g} after {usual:.3g}. Look at the rows of this step. {advice}",
            )

    def _judge_rate(self, rate: float) -> Iterator[tuple[str, str]]:
        self._rates.append(rate)
        if len(self._rates) == IDLE_STEPS and not any(self._rates):
            yield (
                "no_learning_rate",
                "The learning rate is 0, so the weights do not change. Set optimizer.learning_rate, or a schedule that "
                "does not reach 0 before the end of the run.",
            )

    def _judge_mismatch(self, name: str, age: float, difference: float) -> Iterator[tuple[str, str]]:
        earlier = self._mismatches.setdefault(name, deque(maxlen=_HISTORY))
        alike = [value for age_before, value in earlier if abs(age_before - age) <= _SAME_AGE * min(age, 1.0)]
        earlier.append((age, difference))
        usual = statistics.median(alike) if len(alike) >= LEVEL_STEPS else math.inf
        if difference > max(LEAST_JUMP, MISMATCH_JUMP * usual):
            tokens = f"that are {age:.2g} updates old on average" if age > 0 else "of the current weights"
            moved = "the policy has moved much further than before (grad_norm), or " if age > 0 else ""
            yield (
                "mismatch_jump",
                f"Rollout and trainer logprobs of tokens {tokens} differ by {difference:.3f} nats on average, after "
                f"{usual:.2g} in earlier steps of this age: {moved}engines have other weights than they claim, or "
                "compute in another way. Look at the engines' logs, and prove every publish (source.proof.every: 1).",
            )

    def _judge_event_loop(self, share: float) -> Iterator[tuple[str, str]]:
        self._loop_shares.append(share)
        level = statistics.median(self._loop_shares)
        if len(self._loop_shares) == LEVEL_STEPS and level > BUSY_LOOP:
            yield (
                "busy_controller",
                f"The event loop of all rollouts is busy for {level:.0%} of the time, and engines wait for it. Run "
                "engines in their own processes (source.engine.placement: ray, or engine child_process). Let "
                "environments and rewards compute in spurline_concurrency.calls.in_thread.",
            )


@dataclass(frozen=True)
class Finding:
    """One kind of problem in a run."""

    kind: str
    words: str
    """The sentences about the problem, from the last step that had it."""
    steps: tuple[int, ...]
    """The steps that had the problem, in order."""
    when: str
    """These steps in words, such as `Steps 3 to 12 (6 of 60)`."""
    lasts: bool
    """True if many steps, or the last step, had the problem."""


def findings(lines: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    """Return the problems of a run, the most frequent first, from its lines of metrics.jsonl and resolved settings."""
    # Step 0 is an evaluation before training.
    trained = {int(line["step"]): line for line in lines if line["step"]}
    watch = HealthWatch(config)
    steps: dict[str, list[int]] = {}
    latest: dict[str, str] = {}
    for step, metrics in trained.items():
        for kind, words in watch.judge(step, metrics).items():
            steps.setdefault(kind, []).append(step)
            latest[kind] = words
    found: list[Finding] = []
    for kind, at in sorted(steps.items(), key=lambda entry: -len(entry[1])):
        lasts = at[-1] == max(trained) or len(at) >= LASTING_SHARE * len(trained)
        found.append(Finding(kind, latest[kind], tuple(at), _when(at, trained), lasts))
    return found


def _when(steps: Sequence[int], trained: Collection[int]) -> str:
    shown = f"Step {steps[0]:,}" if len(steps) == 1 else f"Steps {steps[0]:,} to {steps[-1]:,}"
    if len(steps) == len(trained):
        return "Every step" if len(steps) > 1 else shown
    return f"{shown} ({len(steps):,} of {len(trained):,})"


def clip_threshold(config: Mapping[str, Any]) -> float | None:
    """Return `optimizer.max_grad_norm` of the resolved settings, or None if gradients are not clipped."""
    threshold = setting(config, "optimizer", "max_grad_norm")
    return None if threshold is None else float(threshold)


class Watcher:
    """Warns about problems after each step of a run, and reports the problems of the whole run at its end."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._config = run.loaded.resolved()
        self._health = HealthWatch(self._config)
        if run.state.checkpoint is not None:
            # Later steps are compared with the steps before the resume.
            for metrics in read_metrics(run.directory.metrics, skip_foreign=True):
                if metrics["step"] <= run.state.step:
                    self._health.judge(int(metrics["step"]), metrics)
        run.loaded.host.attach(self, "insight/health")
        run.add_judge(self.warnings)

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        for kind, words in self._health.judge(step, metrics).items():
            self._run.warn(step, kind, words)

    def warnings(self) -> Sequence[Warned]:
        """Return the problems of the whole run, with their steps."""
        found = findings(read_metrics(self._run.directory.metrics, skip_foreign=True), self._config)
        return [Warned(each.kind, f"{each.words} {each.when}.", each.lasts) for each in found]


def health_words(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the problems of the rollouts of one step. Keys are short names, and values are one or two sentences."""
    return {**dict(_judged_engines(metrics)), **dict(_judged_groups(metrics))}


def _judged_engines(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the problems of what engines generate with."""
    # Logprobs of tokens from older weights are expected to differ, so only tokens of the current weights are judged.
    is_fresh = metrics.get("staleness/mean", 0.0) <= 0
    difference = metrics.get("mismatch/logprob_diff" if is_fresh else "mismatch/fresh", 0.0)
    if difference > LARGEST_MISMATCH:
        # With a correction, this advice is not needed.
        correct = "" if "correction/factor" in metrics else ", or set source.correction"
        yield (
            "mismatch",
            f"Rollout and trainer logprobs differ by {difference:.3f} nats on average. Check that engine and trainer "
            f"use the same weights, precision and temperature{correct}.",
        )
    of_engine, ratio = (metrics.get(f"mismatch/worst_engine{end}", 0.0) for end in ("", "/ratio"))
    if of_engine > LEAST_JUMP and ratio > MISMATCH_JUMP:
        number = metrics.get("mismatch/worst_engine/number")
        engine = "One engine" if number is None else f"Engine {number:.0f}"
        yield (
            "engine_mismatch",
            f"{engine} generates with logprobs that differ from the trainer's by {of_engine:.3f} nats on average, "
            f"{ratio:.0f} times as much as those of the other engines at the same ages. It has older weights, or "
            "another precision or device. Prove every publish (source.proof.every: 1), and look at its log.",
        )
    if (rejected := metrics.get("publish/rejected", 0.0)) > 0:
        yield (
            "undelivered",
            f"{_count(rejected, 'engine')} confirmed new weights but did not generate with them: the logprobs of the "
            f"proof differ by {metrics.get('publish/probe_diff', 0.0):.2g} nats. Choose another source.weight_sync, or "
            "another version of the engine.",
        )
    if (unknown := metrics.get("rollout/unknown_support", 0.0)) > LARGEST_UNKNOWN_SUPPORT:
        yield (
            "unknown_support",
            f"{unknown:.1%} of tokens get no loss, since too many tokens tie with the last of source.sampling.top_k. "
            "Raise top_k and let top_p do the cutting, or let the engine compute in fp32.",
        )


def _judged_groups(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the problems of rewards, prompts, updates and responses."""
    largest = max(abs(metrics.get("advantage/max", 0.0)), abs(metrics.get("advantage/min", 0.0)))
    # In groups of one sample, or with a critic, equal rewards may have advantages other than 0.
    if metrics.get("groups/zero_variance", 0.0) >= 1 and largest <= _NO_ADVANTAGE:
        yield (
            "equal_rewards",
            "All groups have equal rewards, so nothing is learned in this step. The task is too easy or too hard for "
            "the model, or the reward gives the same value to all answers. Look at the sample answers.",
        )
    if (missing := metrics.get("groups/refill_missing", 0.0)) > 0:
        yield (
            "refill_missing",
            f"{_count(missing, 'group')} with equal rewards had to be trained on, since the step reached its limit of "
            "draws. Raise source.max_draws_per_step, or choose prompts that the model solves sometimes.",
        )
    if (given_up := metrics.get("groups/quarantined", 0.0)) > 0:
        yield (
            "given_up",
            f"{_count(given_up, 'prompt')} had to be given up in this step, since all attempts failed. The run stops "
            "when it has given up more different prompts than source.faults.max_quarantined.",
        )
    clipped = metrics.get("policy/clip_fraction_low", 0.0) + metrics.get("policy/clip_fraction_high", 0.0)
    distance = metrics.get("policy/kl_old", 0.0)
    if clipped > LARGEST_CLIPPED or distance > LARGEST_KL_OLD:
        found = (
            f"{clipped:.0%} of tokens are clipped"
            if clipped > LARGEST_CLIPPED
            else f"The policy changes by {distance:.2g} nats per token within the step"
        )
        yield (
            "large_update",
            f"{found}: the updates of one step are too large. Lower optimizer.learning_rate, or take fewer "
            "optimizer steps per batch (minibatches.update_epochs, minibatches.prompts_per_minibatch).",
        )
    if (cut_off := metrics.get("response/share_length", 0.0)) > LARGEST_CUT_SHARE:
        yield (
            "cut_off",
            f"{cut_off:.0%} of responses were cut off at the token limit. Raise source.sampling.max_new_tokens, or set "
            "source.overlong or source.cut_off, so that the model learns to stop earlier.",
        )
    failed = metrics.get("response/share_abort", 0.0) + metrics.get("response/share_error", 0.0)
    if failed > LARGEST_FAILED_SHARE:
        yield (
            "failed_turns",
            f"{failed:.0%} of responses ended with an abort or an error of the engine. Look at the engine's own log.",
        )
    if (unparsed := metrics.get("tools/unparsed", 0.0)) > LARGEST_UNPARSED_SHARE:
        yield (
            "unparsed_calls",
            f"{unparsed:.0%} of tool calls cannot be read, so the model only gets errors. Look at the sample answers. "
            "If the calls are in the format of another model, set the environment's tool_format.",
        )
    if (rejected := metrics.get("correction/rejected", 0.0)) > LARGEST_REJECTED_SHARE:
        yield (
            "rejected",
            f"The correction leaves out {rejected:.0%} of tokens. Make engine and trainer agree better, or widen the "
            "limits of source.correction.",
        )


def _count(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"
