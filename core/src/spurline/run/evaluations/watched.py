"""Evaluate held-out data at a step. The scores decide which checkpoint is the best, and whether the run ends early.

`StepScores` runs the evaluations. `BestSoFar` and `EarlyStop` each watch one metric. Their state is part of a
checkpoint's manifest, so a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spurline.config.run_config import KeepBestConfig, RunConfig, StopWhenConfig, WatchedMetricConfig
from spurline.errors import ConfigError, RunFailedError, UserError, listing, suggestion
from spurline.protocols.backend import Backend, LendsParameters
from spurline.run.evaluations.evaluation import ScheduledEvaluation


class StepScores:
    """Runs the evaluations of each step, including those that hooks request with `Run.evaluate`."""

    def __init__(
        self, evaluations: Sequence[ScheduledEvaluation], backend: Backend, best: BestSoFar, early_stop: EarlyStop
    ) -> None:
        self._evaluations = evaluations
        self._backend = backend
        self._best = best
        self._early_stop = early_stop
        self._asked: dict[str, float] | None = None
        """Metrics that hooks have evaluated in the current step. None between two steps."""

    def open(self) -> None:
        """Begin a step. Metrics that hooks evaluate before `close` are recorded with this step."""
        self._asked = {}

    def close(self) -> None:
        """End the step. Call this after the step is recorded."""
        self._asked = None

    @property
    def asked(self) -> Mapping[str, float]:
        """Return the metrics that hooks have evaluated in this step."""
        return MappingProxyType(self._asked or {})

    def measure(self, step: int, due: Sequence[ScheduledEvaluation]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Run the `due` evaluations, and all others if `stop_when` ends the run. Return metrics and sample answers."""
        scores, samples = self._measured(step, due)
        rest = [evaluation for evaluation in self._evaluations if evaluation not in due]
        if rest and self._early_stop.reason is not None:
            # Every evaluation runs at the end of the run.
            further, answers = self._measured(step, rest)
            scores, samples = scores | further, samples + answers
        return scores, samples

    def beside(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that hooks evaluated in this step. Raises UserError if one of them is in `metrics`."""
        if taken := sorted(self.asked.keys() & metrics.keys()):
            raise UserError(f"run.evaluate: the step itself has a metric '{taken[0]}'. Evaluate under another prefix.")
        return dict(self.asked)

    def ask(self, prefix: str) -> dict[str, float]:
        """Run every evaluation now, and return metrics named PREFIX/NAME. `Run.evaluate` documents the errors."""
        if not self._evaluations:
            what = f"is empty, but run.evaluate({prefix!r}) needs held-out data. Set it, or add `evaluations`."
            raise ConfigError.at("data.eval", what)
        swapped = isinstance(self._backend, LendsParameters) and self._backend.is_swapped
        if swapped and any(evaluation.held_out.measures_copies for evaluation in self._evaluations):
            raise RunFailedError(
                f"run.evaluate({prefix!r}): the engines that answer have their own copy of the weights, so they would "
                "not use the parameters swapped in the backend. Use source: rollouts, or evaluate an export."
            )
        scores, _ = self._run(self._evaluations)
        renamed = {f"{prefix}/{name.removeprefix('eval/')}": value for name, value in scores.items()}
        if self._asked is not None:
            if taken := sorted(renamed.keys() & self._asked.keys()):
                raise UserError(
                    f"run.evaluate({prefix!r}): this step already has a '{taken[0]}'. Give each evaluation of a step a "
                    "prefix of its own."
                )
            self._asked |= renamed
        return renamed

    def _measured(self, step: int, due: Sequence[ScheduledEvaluation]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        scores, samples = self._run(due)
        labels = [evaluation.label for evaluation in due]
        every = [evaluation.label for evaluation in self._evaluations]
        self._early_stop.observe(step, scores, labels, every)
        self._best.observe(step, scores, labels, every)
        return scores, samples

    def _run(self, evaluations: Iterable[ScheduledEvaluation]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics and sample answers. Raises ConfigError if two evaluations return metrics of the same name."""
        scores: dict[str, float] = {}
        samples: list[dict[str, Any]] = []
        for evaluation in evaluations:
            found, answers = evaluation.run(self._backend)
            if taken := sorted(scores.keys() & found.keys()):
                what = f"measures {taken[0]}, and so does another evaluation. Rename this one, or the reward."
                raise ConfigError.at(f"evaluations.{evaluation.name}", what)
            scores |= found
            samples += answers
        return scores, samples


class BestSoFar:
    """The best evaluation of a run so far, by `checkpoint.keep_best`. If `config` is None, no step becomes the best."""

    def __init__(self, config: KeepBestConfig | None) -> None:
        self._config = config
        self.step: int | None = None
        """Step of the best evaluation so far."""
        self.value: float | None = None
        """Value of the metric at that step."""

    def restore(self, saved: Mapping[str, Any] | None, kept_steps: set[int], *, same_data: bool) -> list[str]:
        """Restore the best evaluation from `saved`, the facts in a checkpoint's manifest.

        If it no longer counts, return a note that says why. It counts only if its checkpoint is one of `kept_steps` and
        the held-out data is unchanged (`same_data`).
        """
        config = self._config
        if config is None or saved is None:
            return []
        before = f"the best {saved['metric']} so far, {saved['value']:.4g} at step {saved['step']}"
        if saved["metric"] != config.metric or saved["lower_is_better"] != config.lower_is_better:
            return [f"checkpoint.keep_best changed: {before}, no longer counts."]
        if not same_data:
            return [f"The held-out data changed: {before}, no longer counts."]
        if saved["step"] not in kept_steps:
            return [f"The checkpoint of {before}, is not in this run_dir, and no longer counts."]
        self.step, self.value = saved["step"], saved["value"]
        return []

    def observe(self, step: int, scores: Mapping[str, float], labels: Collection[str], every: Collection[str]) -> None:
        """Update the best evaluation with the scores of a step.

        Args:
            step: The step, or 0 before training. Step 0 has no checkpoint, so it is never the best.
            scores: The metrics of the evaluations that ran at this step.
            labels: Labels of the evaluations that ran at this step.
            every: Labels of all evaluations of the run.

        Raises:
            ConfigError: If `scores` lacks the watched metric although its evaluation ran.
        """
        if self._config is None:
            return
        value = _measured(self._config, "checkpoint.keep_best", scores, labels, every)
        if step and value is not None and (self.value is None or _is_better(self._config, value, self.value)):
            self.step, self.value = step, value

    def facts(self) -> dict[str, Any] | None:
        """Return facts for a manifest, or None while there is no best evaluation."""
        if self._config is None or self.step is None:
            return None
        return {
            "metric": self._config.metric,
            "lower_is_better": self._config.lower_is_better,
            "step": self.step,
            "value": self.value,
        }


class EarlyStop:
    """Ends a run early by the rules of `stop_when`. If `config` is None, the run trains all its steps."""

    def __init__(self, config: StopWhenConfig | None) -> None:
        self._config = config
        self._best: tuple[int, float] | None = None
        """Step and value of the best evaluation so far. A new best value must be better by more than `min_delta`."""
        self._last: tuple[int, float] | None = None
        self._waited = 0
        """Number of evaluations since the best evaluation."""

    def restore(self, saved: Mapping[str, Any] | None, *, same_data: bool) -> list[str]:
        """Restore the values from a checkpoint, as `BestSoFar.restore` does."""
        if self._config is None or saved is None:
            return []
        if any(saved[name] != value for name, value in self._measure().items()):
            return [f"stop_when changed: values of {saved['metric']} before the checkpoint no longer count."]
        if not same_data:
            return [f"The held-out data changed: values of {saved['metric']} before the checkpoint no longer count."]
        self._best = None if saved["best"] is None else (saved["best"][0], saved["best"][1])
        self._last = saved["last"][0], saved["last"][1]
        self._waited = saved["waited"]
        return []

    def observe(self, step: int, scores: Mapping[str, float], labels: Collection[str], every: Collection[str]) -> None:
        """Take the scores of a step into account. The arguments are the same as in `BestSoFar.observe`."""
        if self._config is None or (self._last is not None and self._last[0] == step):
            # A step is evaluated again if something failed after its first evaluation. Count it once.
            return
        value = _measured(self._config, "stop_when", scores, labels, every)
        if value is None:
            return
        if self._best is None or _is_better(self._config, value, self._best[1], self._config.min_delta):
            self._best, self._waited = (step, value), 0
        else:
            self._waited += 1
        self._last = step, value

    @property
    def reason(self) -> str | None:
        """Return why the run is over, or None while it goes on. The evaluation before training never ends the run."""
        config = self._config
        if config is None or self._last is None or self._last[0] == 0 or self._best is None:
            return None
        step, value = self._last
        if config.reaches is not None and not _is_better(config, config.reaches, value):
            return f"{config.metric} reached {value:.4g} at step {step:,} (stop_when.reaches: {config.reaches:g})"
        if config.patience is not None and self._waited >= config.patience:
            by = f"by {config.min_delta:g} " if config.min_delta else ""
            return (
                f"{config.metric} was {self._best[1]:.4g} at step {self._best[0]:,} and has not got better {by}in "
                f"{self._waited:,} evaluation{'s' if self._waited != 1 else ''} (stop_when.patience: {config.patience})"
            )
        return None

    def facts(self) -> dict[str, Any] | None:
        """Return facts for a manifest, or None before the first value."""
        if self._config is None or self._last is None:
            return None
        return {**self._measure(), "best": self._best, "last": self._last, "waited": self._waited}

    def _measure(self) -> dict[str, Any]:
        """Return the settings that must stay the same for values to be comparable. A resume may change the others."""
        assert self._config is not None
        config = self._config
        return {"metric": config.metric, "lower_is_better": config.lower_is_better, "min_delta": config.min_delta}


def check_watched(run: RunConfig, evaluations: Sequence[ScheduledEvaluation]) -> None:
    """Raise ConfigError if `keep_best` or `stop_when` names a metric that its evaluation does not measure."""
    by_label = {evaluation.label: evaluation for evaluation in evaluations}
    for where, config in (("checkpoint.keep_best", run.checkpoint.keep_best), ("stop_when", run.stop_when)):
        if config is not None:
            evaluation = by_label.get(_label_of(config.metric, by_label))
            known = None if evaluation is None else evaluation.metrics()
            if known is not None and config.metric not in known:
                raise _not_measured(config.metric, where, known)


def is_same_data(config: WatchedMetricConfig | None, before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether the held-out data of the watched metric has the same fingerprint as before.

    `before` and `now` have the fingerprints by label of the evaluation.
    """
    if config is None:
        return True
    label = _label_of(config.metric, now)
    return before.get(label) == now.get(label)


def _measured(
    config: WatchedMetricConfig,
    where: str,
    scores: Mapping[str, float],
    labels: Collection[str],
    every: Collection[str],
) -> float | None:
    """Return the watched metric, or None if the evaluation that measures it is not among `labels`."""
    if _label_of(config.metric, every) not in labels:
        return None
    if config.metric not in scores:
        raise _not_measured(config.metric, where, scores)
    return float(scores[config.metric])


def _not_measured(metric: str, where: str, known: Collection[str]) -> ConfigError:
    return ConfigError.at(
        f"{where}.metric",
        f"is {metric}, which this evaluation does not measure.{suggestion(metric, known)} Metrics: {listing(known)}.",
    )


def _is_better(config: WatchedMetricConfig, value: float, than: float, by: float = 0.0) -> bool:
    """Return whether a value is better than another by more than `by`. NaN is worse than anything."""
    if math.isnan(than):
        return not math.isnan(value)
    return value < than - by if config.lower_is_better else value > than + by


def _label_of(metric: str, labels: Collection[str]) -> str:
    """Return the label of the evaluation that measures a metric: the longest label that begins the metric's name."""
    return next((label for label in sorted(labels, reverse=True) if metric.startswith(f"{label}/")), "eval")
