"""End a run early by one metric of its held-out evaluation: when it is good enough, or has not got better for a while.

In: the scores of each evaluation, and what the manifest of the checkpoint that a run continues says. Out: why the run
is over, if it is. A resume counts on from its checkpoint, as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from spurline.config.run_config import StopWhenConfig
from spurline.run.checkpoints.best import is_better, measured


class EarlyStop:
    """config: None when the run is to make all its steps; then it is never over."""

    def __init__(self, config: StopWhenConfig | None) -> None:
        self._config = config
        self._best: tuple[int, float] | None = None
        """Step and value of the best evaluation so far, by `min_delta`."""
        self._last: tuple[int, float] | None = None
        self._waited = 0
        """Evaluations in a row that were not better."""

    def restore(self, saved: Mapping[str, Any] | None, *, same_data: bool) -> list[str]:
        """Go on from what a checkpoint knew of; returns notes on why its values no longer count.

        saved: `facts` as the checkpoint's manifest has them. same_data: whether it was measured on the data that this
        run evaluates on.
        """
        config = self._config
        if config is None or saved is None:
            return []
        if any(saved[name] != value for name, value in _measure(config).items()):
            return [f"stop_when changed: values of {saved['metric']} before the checkpoint no longer count."]
        if not same_data:
            return [f"The held-out data changed: values of {saved['metric']} before the checkpoint no longer count."]
        self._best = None if saved["best"] is None else (saved["best"][0], saved["best"][1])
        self._last = saved["last"][0], saved["last"][1]
        self._waited = saved["waited"]
        return []

    def observe(self, step: int, scores: Mapping[str, float], labels: Collection[str], every: Collection[str]) -> None:
        """Look at the evaluations of a step, 0 for those before training; see `BestSoFar.observe`, which raises the
        same."""
        if self._config is None or (self._last is not None and self._last[0] == step):
            # The evaluation of a step is made again where something failed after it.
            return
        value = measured(self._config, "stop_when", scores, labels, every)
        if value is None:
            return
        if self._best is None or is_better(self._config, value, self._best[1], self._config.min_delta):
            self._best, self._waited = (step, value), 0
        else:
            self._waited += 1
        self._last = step, value

    @property
    def reason(self) -> str | None:
        """Why the run is over, None while it goes on. The model that training begins with ends no run."""
        config = self._config
        if config is None or self._last is None or self._last[0] == 0 or self._best is None:
            return None
        step, value = self._last
        if config.reaches is not None and not is_better(config, config.reaches, value):
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
        return {**_measure(self._config), "best": self._best, "last": self._last, "waited": self._waited}


def _measure(config: StopWhenConfig) -> dict[str, Any]:
    """Return the settings that make values comparable; patience and the value to reach may change on a resume."""
    return {"metric": config.metric, "lower_is_better": config.lower_is_better, "min_delta": config.min_delta}
