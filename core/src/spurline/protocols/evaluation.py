"""Kind `evaluation`: measure the model on held-out data, during a run and at its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from spurline.config.section import ComponentConfig
from spurline.errors import Problem
from spurline.protocols.dataset import DatasetList
from spurline.protocols.held_out import HeldOutEvaluation

if TYPE_CHECKING:
    from spurline.protocols.loss import Loss
    from spurline.protocols.source import BatchSource, Samples, SourceContext


class EvaluationConfig(ComponentConfig):
    """Settings of an evaluation, and what it needs from the run."""

    kind: ClassVar[str] = "evaluation"
    generates: ClassVar[bool] = False
    """True if the evaluation asks the backend to generate answers. The backend must then implement `Generates`."""
    needs_attempts: ClassVar[bool] = False
    """True if the evaluation asks the source for attempts at prompts. The source's facts must have `makes_attempts`."""
    needs_token_loss: ClassVar[bool] = False
    """True if the evaluation computes the run's loss on held-out tokens, where no advantages or returns exist."""

    data: DatasetList = Field(min_length=1)
    """Held-out datasets, never trained on."""
    every_steps: int | None = Field(default=None, gt=0)
    """Evaluate each time this many steps are done. Every evaluation also runs at the end."""
    at_start: bool = False
    """Also measure the model before its first step, as step 0."""

    def problems(self, run: Any) -> Iterable[Problem]:
        if self.generates and not run.backend.facts.generates:
            yield Problem(
                "name",
                f"is {self.name}, which asks the backend for answers, but backend '{run.backend.name}' does not "
                "generate. Remove it, or set backend.name: local.",
            )
        if self.needs_attempts and not run.source.facts.makes_attempts:
            yield Problem(
                "name",
                f"is {self.name}, which needs attempts at prompts, but the source '{run.source.name}' makes none. "
                "Use evaluation `answers`, in which the backend generates, or train with source: rollouts.",
            )
        if self.needs_token_loss and run.loss.trains_on in ("advantages", "returns"):
            yield Problem(
                "name",
                f"is {self.name}, but the run's loss, {run.loss.name}, cannot be computed on held-out tokens, since it "
                "needs the advantages of rollouts. Use evaluation `answers` or `rollouts`.",
            )


@dataclass(frozen=True)
class EvaluationContext:
    """Everything that an evaluation gets from its run.

    Attributes:
        run: The context that the source also gets: config, plugins, tokenizer and layout.
        source: Source of the run. It has not started yet.
        loss: Loss of the run.
        where: Key path of the evaluation's settings, `evaluations.NAME`, for messages.
    """

    run: SourceContext
    source: BatchSource
    loss: Loss
    where: str = "evaluation.generate"


class MeasuresSamples(HeldOutEvaluation):
    """An evaluation of tokenized samples, as the default evaluation of `data.eval` is."""

    samples: Samples
    """The tokenized samples. Other evaluations of the same data use the rows of these samples."""
