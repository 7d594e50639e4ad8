"""Evaluate held-out data at a step: the evaluations that are due, and those that hooks ask for by `run.evaluate`.

Metrics get names that no other metric of the step has, and are passed to `keep_best` and `stop_when`. The run decides
which evaluations are due, and reports the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spurline.errors import ConfigError, RunFailedError, UserError
from spurline.protocols.backend import Backend, LendsParameters
from spurline.run.evaluations.evaluation import ScheduledEvaluation, run_all
from spurline.run.evaluations.watched import BestSoFar, EarlyStop


class StepScores:
    """Makes the evaluations of each step, one step after the other."""

    def __init__(
        self, evaluations: Sequence[ScheduledEvaluation], backend: Backend, best: BestSoFar, early_stop: EarlyStop
    ) -> None:
        self._evaluations = evaluations
        self._backend = backend
        self._best = best
        self._early_stop = early_stop
        self._asked: dict[str, float] | None = None
        """Metrics of the evaluations that hooks asked for in the current step; None between two steps."""

    def open(self) -> None:
        """Begin a step. Evaluations by hooks are recorded with it from now on."""
        self._asked = {}

    def close(self) -> None:
        """End the step after it is recorded."""
        self._asked = None

    @property
    def asked(self) -> Mapping[str, float]:
        """Return the metrics that hooks have evaluated in this step."""
        return MappingProxyType(self._asked or {})

    def measure(self, step: int, due: Sequence[ScheduledEvaluation]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics and sample answers of these evaluations, and of all others if `stop_when` ends the run now."""
        scores, samples = self._measured(step, due)
        rest = [evaluation for evaluation in self._evaluations if evaluation not in due]
        if rest and self._early_stop.reason is not None:
            # The run ends here, and every evaluation runs at the end.
            further, answers = self._measured(step, rest)
            scores, samples = scores | further, samples + answers
        return scores, samples

    def beside(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that hooks have evaluated in this step. Raises UserError if `metrics` has one of them."""
        if taken := sorted(self.asked.keys() & metrics.keys()):
            raise UserError(
                f"run.evaluate: the metric '{taken[0]}' is one of the step's own. Evaluate under another prefix."
            )
        return dict(self.asked)

    def ask(self, prefix: str) -> dict[str, float]:
        """Make every evaluation now, with metrics under PREFIX/. `Run.evaluate` lists the errors."""
        if not self._evaluations:
            what = f"is empty, and run.evaluate({prefix!r}) needs held-out data. Set it, or add `evaluations`."
            raise ConfigError.at("data.eval", what)
        swapped = isinstance(self._backend, LendsParameters) and self._backend.is_swapped
        if swapped and any(evaluation.held_out.measures_copies for evaluation in self._evaluations):
            raise RunFailedError(
                f"run.evaluate({prefix!r}): the answers come from engines with weights of their own, so the parameters "
                "swapped in the backend would not count. Use source: rollouts, or evaluate an export."
            )
        scores, _ = run_all(self._evaluations, self._backend)
        renamed = {f"{prefix}/{name.removeprefix('eval/')}": value for name, value in scores.items()}
        if self._asked is not None:
            if taken := sorted(renamed.keys() & self._asked.keys()):
                raise UserError(
                    f"run.evaluate({prefix!r}): this step has a '{taken[0]}' already. Give each evaluation of a step a "
                    "prefix of its own."
                )
            self._asked |= renamed
        return renamed

    def _measured(self, step: int, due: Sequence[ScheduledEvaluation]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        scores, samples = run_all(due, self._backend)
        labels = [evaluation.label for evaluation in due]
        every = [evaluation.label for evaluation in self._evaluations]
        self._early_stop.observe(step, scores, labels, every)
        self._best.observe(step, scores, labels, every)
        return scores, samples
