"""All evaluations of a run: that of `data.eval`, and those under `evaluations`, each with its rhythm and its name.

The section `evaluation` is a short way to write the evaluations `loss` and `answers` on `data.eval`, or what the source
has of its own for that data; the rest of a run knows only a list of scheduled evaluations.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from spurline.config.run_config import DataEvaluationConfig, RunConfig
from spurline.errors import ConfigError, DataError, PluginError
from spurline.evaluation.answers import AnswersEvaluation
from spurline.evaluation.configs import AnswersEvaluationConfig, LossEvaluationConfig
from spurline.evaluation.loss import LossEvaluation
from spurline.protocols.backend import Backend
from spurline.protocols.evaluation import EvaluationConfig, EvaluationContext, HeldOutEvaluation
from spurline.protocols.source import Longest


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the evaluation's setting in front of errors of its data."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{f'evaluations.{name}' if name else 'data.eval'}: {error}") from error


@dataclass(frozen=True)
class ScheduledEvaluation:
    """One evaluation of a run.

    name: as under `evaluations`; empty for that of `data.eval`. every_steps: None for the end of the run alone.
    at_start: whether the model is measured before its first step too.
    """

    name: str
    every_steps: int | None
    at_start: bool
    held_out: HeldOutEvaluation

    @property
    def label(self) -> str:
        """What its data is called in plans, summaries and reports."""
        return f"eval/{self.name}" if self.name else "eval"

    def longest(self) -> Longest | None:
        """Return the longest sequence that it makes; None where that is not known. Raises DataError naming it."""
        with _naming(self.name):
            return self.held_out.longest()

    def metrics(self) -> set[str] | None:
        """Whole names of all that it may measure, `eval/...`; None where only an evaluation tells."""
        names = self.held_out.metrics()
        return None if names is None else {f"{self.label}/{name}" for name in (*names, "time")}

    def run(self, backend: Backend, root: str = "eval") -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics under their whole names, `ROOT/...` or `ROOT/NAME/...`, time in seconds included, and sample answers,
        marked with the name if there is one."""
        prefix = f"{root}/{self.name}/" if self.name else f"{root}/"
        begin = time.perf_counter()
        measured: object = self.held_out.evaluate(backend)
        if not (isinstance(measured, tuple) and len(measured) == 2 and isinstance(measured[0], Mapping)):
            raise PluginError(
                f"{type(self.held_out).__name__}.evaluate returned a {type(measured).__name__} instead of two things, "
                "metrics by name and a list of sample answers. End it with `return metrics, []` when it has no answers."
            )
        metrics, samples = measured
        for name in metrics:
            if name.startswith("eval/"):
                raise PluginError(
                    f"{type(self.held_out).__name__} calls a metric '{name}'. Leave eval/ out: the run puts "
                    f"'{prefix}' in front of each."
                )
        metrics = {f"{prefix}{name}": value for name, value in metrics.items()}
        mark = {"evaluation": self.name} if self.name else {}
        return {**metrics, f"{prefix}time": time.perf_counter() - begin}, [mark | sample for sample in samples]


class DataEvaluation(HeldOutEvaluation):
    """What the section `evaluation` asks for: the loss on `data.eval`, and scores of answers to its prompts."""

    def __init__(self, config: RunConfig, context: EvaluationContext) -> None:
        data, settings = config.data.eval, config.evaluation
        self._loss = LossEvaluation(LossEvaluationConfig(data=data, batch_size=settings.batch_size), context)
        self._answers: AnswersEvaluation | None = None
        if settings.generate is not None:
            generate = {name: getattr(settings.generate, name) for name in type(settings.generate).model_fields}
            answers = AnswersEvaluationConfig(data=data, **generate)
            self._answers = AnswersEvaluation(answers, context, self._loss.samples.answered())

    def summary(self) -> Mapping[str, Any]:
        return self._loss.summary()

    def longest(self) -> Longest:
        answers = None if self._answers is None else self._answers.longest()
        samples = self._loss.longest()
        return samples if answers is None or samples.tokens >= answers.tokens else answers

    def fingerprint(self) -> str:
        return self._loss.fingerprint()

    def metrics(self) -> Collection[str] | None:
        of_loss, of_answers = self._loss.metrics(), () if self._answers is None else self._answers.metrics()
        return None if of_loss is None else {*of_loss, *of_answers}

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        metrics, samples = self._loss.evaluate(backend)
        if self._answers is not None:
            scores, samples = self._answers.evaluate(backend)
            metrics |= scores
        return metrics, samples

    def close(self) -> None:
        if self._answers is not None:
            self._answers.close()


def build_evaluations(context: EvaluationContext, stack: ExitStack) -> tuple[ScheduledEvaluation, ...]:
    """Every evaluation of the run, that of `data.eval` first. The stack closes them."""
    config, registry = context.run.config, context.run.host.registry
    built: list[ScheduledEvaluation] = []

    def add(name: str, settings: DataEvaluationConfig | EvaluationConfig, held_out: HeldOutEvaluation) -> None:
        stack.callback(held_out.close)
        built.append(ScheduledEvaluation(name, settings.every_steps, settings.at_start, held_out))

    if config.data.eval:
        with _naming(""):
            own = context.source.evaluation() or DataEvaluation(config, context)
        add("", config.evaluation, own)
    for name, settings in config.evaluations.items():
        here = replace(context, where=f"evaluations.{name}")
        with _naming(name):
            held_out = registry.create("evaluation", settings, context=here)
        add(name, settings, held_out)
    return tuple(built)


def run_all(
    evaluations: Iterable[ScheduledEvaluation], backend: Backend
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and sample answers of all of them. Raises ConfigError for a metric that two of them measure."""
    scores: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    for evaluation in evaluations:
        found, answers = evaluation.run(backend)
        if taken := sorted(scores.keys() & found.keys()):
            raise ConfigError.at(
                f"evaluations.{evaluation.name}",
                f"measures {taken[0]}, which another evaluation measures too. Rename this one, or the reward of that "
                "name.",
            )
        scores |= found
        samples += answers
    return scores, samples


def metrics_of(evaluations: Sequence[ScheduledEvaluation]) -> dict[str, set[str] | None]:
    """Whole names of all that each may measure, by `label`; None where only an evaluation tells."""
    return {evaluation.label: evaluation.metrics() for evaluation in evaluations}


def fingerprints(evaluations: Sequence[ScheduledEvaluation]) -> dict[str, str]:
    """Of the held-out data by `label`."""
    return {evaluation.label: evaluation.held_out.fingerprint() for evaluation in evaluations}
