"""Watch one metric of the held-out evaluations, to keep the best checkpoint and to end a run early.

Both classes observe the scores of each evaluation. Their state is part of a checkpoint's manifest, so that a resumed
run goes on as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spurline.config.run_config import KeepBestConfig, RunConfig, StopWhenConfig, WatchedMetricConfig
from spurline.errors import ConfigError, listing, suggestion
from spurline.run.evaluations.evaluation import ScheduledEvaluation


class BestSoFar:
    """The best evaluation of a run so far, by `checkpoint.keep_best`; without a config, no step is ever the best."""

    def __init__(self, config: KeepBestConfig | None) -> None:
        self._config = config
        self.step: int | None = None
        """Step of the best evaluation so far."""
        self.value: float | None = None
        """Value of the metric at that step."""

    def restore(self, saved: Mapping[str, Any] | None, kept_steps: set[int], *, same_data: bool) -> list[str]:
        """Restore the best evaluation from a checkpoint, or return notes on why it no longer counts.

        Args:
            saved: The `facts` in the checkpoint's manifest.
            kept_steps: Steps of the checkpoints in this run_dir.
            same_data: Whether the held-out data is unchanged since the checkpoint.
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
        """Look at the evaluations of a step.

        Args:
            step: The step; 0 for evaluations before training, of which there is no checkpoint.
            scores: The metrics of these evaluations.
            labels: Labels of these evaluations.
            every: Labels of all evaluations of the run.

        Raises:
            ConfigError: If the evaluation of the watched metric does not measure it.
        """
        if self._config is None:
            return
        value = _measured(self._config, "checkpoint.keep_best", scores, labels, every)
        if step and value is not None and (self.value is None or _is_better(self._config, value, self.value)):
            self.step, self.value = step, value

    def facts(self) -> dict[str, Any] | None:
        """Return facts for a manifest; None while there is no best evaluation."""
        if self._config is None or self.step is None:
            return None
        return {
            "metric": self._config.metric,
            "lower_is_better": self._config.lower_is_better,
            "step": self.step,
            "value": self.value,
        }


class EarlyStop:
    """Ends a run when `stop_when` says so; without a config, the run makes all its steps."""

    def __init__(self, config: StopWhenConfig | None) -> None:
        self._config = config
        self._best: tuple[int, float] | None = None
        """Step and value of the best evaluation so far, by `min_delta`."""
        self._last: tuple[int, float] | None = None
        self._waited = 0
        """Evaluations in a row that were not better."""

    def restore(self, saved: Mapping[str, Any] | None, *, same_data: bool) -> list[str]:
        """Restore the values from a checkpoint. Arguments and result are those of `BestSoFar.restore`."""
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
        """Look at the evaluations of a step; arguments and errors are those of `BestSoFar.observe`."""
        if self._config is None or (self._last is not None and self._last[0] == step):
            # The evaluation of a step is made again if something failed after it.
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
        """Return why the run is over, None while it goes on. The model that training begins with ends no run."""
        config = self._config
        if config is None or self._last is None or self._last[0] == 0 or self._best is None:
            return None
        step, value = self._last
        if config.reaches is not None and not _is_better(config, config.reaches, value):
            return f"{config.metric} reached {value:.4g} at step {step:,} (stop_when.reaches: {config.reaches:g})"
        if config.patience is not None and self._waited >= config.patience:
            by = f"by {config.min_delta:g} " if config.min_delta else ""
            return (
                f"{config.metric} has not got better than {self._best[1]:.4g}, of step {self._best[0]:,}, {by}in "
                f"{self._waited:,} evaluation{'s' if self._waited != 1 else ''} (stop_when.patience: {config.patience})"
            )
        return None

    def facts(self) -> dict[str, Any] | None:
        """Return facts for a manifest; None while there are none."""
        if self._config is None or self._last is None:
            return None
        return {**self._measure(), "best": self._best, "last": self._last, "waited": self._waited}

    def _measure(self) -> dict[str, Any]:
        """Return the settings that make values comparable; patience and the value to reach may change on a resume."""
        assert self._config is not None
        config = self._config
        return {"metric": config.metric, "lower_is_better": config.lower_is_better, "min_delta": config.min_delta}


def check_watched(run: RunConfig, evaluations: Sequence[ScheduledEvaluation]) -> None:
    """Raise ConfigError for a watched metric that its evaluation will not measure."""
    by_label = {evaluation.label: evaluation for evaluation in evaluations}
    for where, config in (("checkpoint.keep_best", run.checkpoint.keep_best), ("stop_when", run.stop_when)):
        if config is not None:
            evaluation = by_label.get(_label_of(config.metric, by_label))
            known = None if evaluation is None else evaluation.metrics()
            if known is not None and config.metric not in known:
                raise _not_measured(config.metric, where, known)


def is_same_data(config: WatchedMetricConfig | None, before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether the evaluation of the metric has the same fingerprint, by its label, as before."""
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
    """Return the watched metric; None if the evaluation that measures it is not among `labels`."""
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
    """Return the label, `eval` or `eval/NAME`, of the evaluation that measures a metric: the longest that fits."""
    return next((label for label in sorted(labels, reverse=True) if metric.startswith(f"{label}/")), "eval")
