"""Build all evaluations of a run: the evaluation of `data.eval`, and those under `evaluations`.

A source may bring its own evaluation of `data.eval`. Otherwise the default evaluation measures `data.eval`, and so do
plugins that add settings to the section `evaluation`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from spurline.config.run_config import DataEvaluationConfig, RunConfig
from spurline.errors import ConfigError, DataError, PluginError
from spurline.plugins.host import installed_plugins
from spurline.plugins.official import how_to_enable, plugin_of_kind
from spurline.protocols.backend import Backend
from spurline.protocols.dataset import Longest
from spurline.protocols.evaluation import EvaluationConfig, EvaluationContext, MeasuresSamples
from spurline.protocols.held_out import HeldOutEvaluation


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the key of the evaluation to errors about its data."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{f'evaluations.{name}' if name else 'data.eval'}: {error}") from error


@dataclass(frozen=True)
class ScheduledEvaluation:
    """One evaluation of a run.

    Attributes:
        name: Key under `evaluations`, or an empty text for `data.eval`.
        every_steps: Steps between two evaluations. If None, it runs only at the end of the run.
        at_start: Whether the model is also evaluated before the first step.
        held_out: The evaluation itself.
    """

    name: str
    every_steps: int | None
    at_start: bool
    held_out: HeldOutEvaluation

    @property
    def label(self) -> str:
        """Return the name of this evaluation in plans, summaries and reports."""
        return f"eval/{self.name}" if self.name else "eval"

    def longest(self) -> Longest | None:
        """Return the longest sequence of the data, or None if it is unknown. A DataError names the evaluation."""
        with _naming(self.name):
            return self.held_out.longest()

    def metrics(self) -> set[str] | None:
        """Return the full names, `eval/...`, of all metrics, or None if they are unknown before the evaluation runs."""
        names = self.held_out.metrics()
        return None if names is None else {f"{self.label}/{name}" for name in (*names, "time")}

    def run(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics by full name, `eval/...` or `eval/NAME/...`, and sample answers.

        The metrics include `time` in seconds. Each answer includes the evaluation's name, unless the name is empty.
        """
        begin = time.perf_counter()
        measured: object = self.held_out.evaluate(backend)
        if not (isinstance(measured, tuple) and len(measured) == 2 and isinstance(measured[0], Mapping)):
            raise PluginError(
                f"{type(self.held_out).__name__}.evaluate returned a {type(measured).__name__} instead of metrics by "
                "name and a list of sample answers. If it has no answers, end it with `return metrics, []`."
            )
        found, samples = measured
        metrics = {f"{self.label}/{name}": value for name, value in found.items()}
        mark = {"evaluation": self.name} if self.name else {}
        return {**metrics, f"{self.label}/time": time.perf_counter() - begin}, [mark | sample for sample in samples]


class DataEvaluation(HeldOutEvaluation):
    """Measures `data.eval` with the default evaluation and with plugins that add settings to section `evaluation`."""

    def __init__(self, config: RunConfig, context: EvaluationContext) -> None:
        registry = context.run.host.registry
        data: dict[str, Any] = {"data": config.data.eval}
        name = registry.default("evaluation")
        if name is None:
            plugin = plugin_of_kind("evaluation")
            is_installed = plugin in installed_plugins()
            how = f" Plugin '{plugin}' does: {how_to_enable(plugin, is_installed=is_installed)}." if plugin else ""
            raise ConfigError.at("data.eval", f"is given, but no enabled plugin measures held-out data.{how}")
        chosen, given = registry.get("evaluation", name), dict[str, Any](data, batch_size=config.evaluation.batch_size)
        if "batch_size" not in chosen.config.model_fields and given.pop("batch_size") is not None:
            raise ConfigError.at("evaluation.batch_size", f"is given, but '{name}' has no such setting. Remove it.")
        settings = chosen.config(**given)
        self._loss: MeasuresSamples = registry.create("evaluation", settings, context=context)
        self._parts: list[HeldOutEvaluation] = []
        for part in config.evaluation.parts:
            given = {name: getattr(part, name) for name in type(part).model_fields}
            settings = registry.get("evaluation", part.component).config(**data, **given)
            answered = self._loss.samples.answered()
            self._parts.append(registry.create("evaluation", settings, context=context, datasets=answered))

    def summary(self) -> Mapping[str, Any]:
        return self._loss.summary()

    def longest(self) -> Longest | None:
        found = [one for one in (each.longest() for each in (self._loss, *self._parts)) if one is not None]
        return max(found, key=lambda longest: longest.tokens, default=None)

    def fingerprint(self) -> str:
        return self._loss.fingerprint()

    def metrics(self) -> Collection[str] | None:
        names: set[str] = set()
        for each in (self._loss, *self._parts):
            found = each.metrics()
            if found is None:
                return None
            names |= {*found}
        return names

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        metrics, samples = self._loss.evaluate(backend)
        for part in self._parts:
            scores, answers = part.evaluate(backend)
            metrics |= scores
            samples = [*samples, *answers]
        return metrics, samples

    def close(self) -> None:
        for part in self._parts:
            part.close()


def build_evaluations(context: EvaluationContext, stack: ExitStack) -> tuple[ScheduledEvaluation, ...]:
    """Build every evaluation of the run, beginning with `data.eval`. The stack closes them."""
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


def fingerprints(evaluations: Sequence[ScheduledEvaluation]) -> dict[str, str]:
    """Return the fingerprints of the held-out data by `label`."""
    return {evaluation.label: evaluation.held_out.fingerprint() for evaluation in evaluations}
