"""Keep track of the best checkpoint of a run so far, by one metric of its held-out evaluation.

In: the scores of each evaluation, and what the manifest of the checkpoint that a run continues says. Out: whether this
step is the best, and what the next manifest says. It writes nothing; `spurline.run.checkpoints.checkpoint` keeps the
folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from spurline.config.run_config import KeepBestConfig, RunConfig, WatchedMetricConfig
from spurline.errors import ConfigError, listing, suggestion


class BestSoFar:
    """config: None when no checkpoint is to be kept for its score; then no step is ever the best."""

    def __init__(self, config: KeepBestConfig | None) -> None:
        self._config = config
        self.step: int | None = None
        """Step of the best evaluation so far."""
        self.value: float | None = None
        """Its score."""

    def restore(self, saved: Mapping[str, Any] | None, kept_steps: set[int], *, same_data: bool) -> list[str]:
        """Go on from the best that a checkpoint knew of; returns notes on why that may not be compared.

        saved: `facts` as the checkpoint's manifest has them. kept_steps: those of the checkpoints in this run_dir.
        same_data: whether it was measured on the data that this run evaluates on.
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
        """Look at the evaluations of a step. labels: theirs. every: those of all evaluations of the run.

        Raises ConfigError naming the metrics there are when the evaluation of the chosen one does not measure it.
        """
        if self._config is None:
            return
        value = measured(self._config, "checkpoint.keep_best", scores, labels, every)
        # There is no checkpoint of step 0 that could be kept.
        if step and value is not None and (self.value is None or is_better(self._config, value, self.value)):
            self.step, self.value = step, value

    def facts(self) -> dict[str, Any] | None:
        """Return facts for a manifest; None while there is none."""
        if self._config is None or self.step is None:
            return None
        metric = self._config.metric
        return {
            "metric": metric,
            "lower_is_better": self._config.lower_is_better,
            "step": self.step,
            "value": self.value,
        }


def measured(
    config: WatchedMetricConfig,
    where: str,
    scores: Mapping[str, float],
    labels: Collection[str],
    every: Collection[str],
) -> float | None:
    """The watched metric among the scores of some evaluations; None when the one that measures it is not among them.

    where: key of the config, for messages. scores, labels, every: as for `BestSoFar.observe`, which raises the same.
    """
    if label_of(config.metric, every) not in labels:
        return None
    if config.metric not in scores:
        raise _not_measured(config.metric, where, scores)
    return float(scores[config.metric])


def check_watched(run: RunConfig, metrics: Callable[[], Mapping[str, Collection[str] | None]]) -> None:
    """Raise ConfigError for a watched metric that its evaluation will not measure, as far as evaluations can tell.

    metrics: of each evaluation, by `eval` or `eval/NAME`; None where only the evaluation itself tells. Called where a
    metric is watched: losses of others are asked for theirs.
    """
    for where, config in (("checkpoint.keep_best", run.checkpoint.keep_best), ("stop_when", run.stop_when)):
        if config is None:
            continue
        of_all = metrics()
        known = of_all.get(label_of(config.metric, of_all))
        if known is not None and config.metric not in known:
            raise _not_measured(config.metric, where, known)


def _not_measured(metric: str, where: str, known: Collection[str]) -> ConfigError:
    return ConfigError.at(
        f"{where}.metric",
        f"is {metric}, which this evaluation does not measure.{suggestion(metric, known)} Metrics: {listing(known)}.",
    )


def is_better(config: WatchedMetricConfig, value: float, than: float, by: float = 0.0) -> bool:
    """Return whether a value is better than another by more than so much. NaN is worse than anything."""
    if math.isnan(than):
        return not math.isnan(value)
    return value < than - by if config.lower_is_better else value > than + by


def is_same_data(config: WatchedMetricConfig | None, before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether the evaluation of the metric has the same fingerprint, by `eval` or `eval/NAME`, as before."""
    if config is None:
        return True
    label = label_of(config.metric, now)
    return before.get(label) == now.get(label)


def label_of(metric: str, labels: Collection[str]) -> str:
    """Return the label of the evaluation that measures a metric: the longest that fits."""
    return next((label for label in sorted(labels, reverse=True) if metric.startswith(f"{label}/")), "eval")
