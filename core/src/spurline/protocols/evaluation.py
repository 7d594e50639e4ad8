"""Kind `evaluation`: measure the model on held-out data, now and then and at the end of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from spurline.config.section import ComponentConfig
from spurline.errors import Problem
from spurline.protocols.dataset import DatasetList

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig
    from spurline.protocols.backend import Backend
    from spurline.protocols.loss import Loss
    from spurline.protocols.source import BatchSource, Longest, SourceContext


class EvaluationConfig(ComponentConfig):
    """Settings of an evaluation, and what it needs of the run."""

    kind: ClassVar[str] = "evaluation"
    generates: ClassVar[bool] = False
    """Whether it asks the backend for answers, which therefore must be one that `Generates`."""
    needs_attempts: ClassVar[bool] = False
    """Whether it asks the source for attempts at prompts, whose config therefore must set `makes_attempts`."""
    needs_token_loss: ClassVar[bool] = False
    """Whether it computes the run's loss on held-out tokens, which a loss of rollouts cannot do."""

    data: DatasetList = Field(min_length=1)
    """Held-out datasets, never trained on."""
    every_steps: int | None = Field(default=None, gt=0)
    """Evaluate each time this many steps are done; it always runs once at the end."""
    at_start: bool = False
    """Also measure the model before its first step, as step 0."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.generates and not run.backend.generates:
            yield Problem(
                "name",
                f"is {self.name}, which asks for answers, and backend '{run.backend.name}' does not generate. Remove "
                "it, or set backend.name: local.",
            )
        if self.needs_attempts and not run.source.makes_attempts:
            yield Problem(
                "name",
                f"is {self.name}, which makes attempts at prompts, and the source '{run.source.name}' makes none. "
                "Choose answers, which the backend generates, or train with source: rollouts.",
            )
        if self.needs_token_loss and run.loss.trains_on in ("advantages", "returns"):
            yield Problem(
                "name",
                f"is {self.name}, and the run's loss, {run.loss.name}, has no value on held-out tokens: it reads the "
                "advantages of rollouts. Choose answers or rollouts.",
            )


@dataclass(frozen=True)
class EvaluationContext:
    """What an evaluation may build on.

    run: config, plugins, tokenizer and layout, as for sources. source: of the run, not started yet. loss: of the run.
    where: key path of its settings, `evaluations.NAME`, for messages.
    """

    run: SourceContext
    source: BatchSource
    loss: Loss
    where: str = "evaluation.generate"


class HeldOutEvaluation(ABC):
    """Measures a backend on held-out data. Draws no random numbers that training could miss.

    Factory: `Class(config, context=EvaluationContext)`. It reads its data there, and starts nothing. One that a source
    makes itself for `data.eval`, in `BatchSource.evaluation`, is built as the source likes.

    measures_copies: whether it asks engines with weights of their own, so that weights swapped in the backend would not
    count.
    """

    measures_copies: bool = False

    @abstractmethod
    def summary(self) -> Mapping[str, Any]:
        """JSON-able facts about the data; see `spurline.data.token_store`."""

    def longest(self) -> Longest | None:
        """Its longest sequence, as of a source; None where its batches themselves tell."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the held-out data does; a resume then says that scores before and after do not compare."""

    @abstractmethod
    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Finite metrics, and sample answers: prompt, response, reference and scores.

        Names are those within this evaluation, such as `loss`: the run puts `eval/`, or `eval/NAME/` for one with a
        name, in front, and adds `time` in seconds.
        """

    def metrics(self) -> Collection[str] | None:
        """Names of all that `evaluate` may measure; None where only an evaluation tells. A run whose
        `checkpoint.keep_best` or `stop_when` names another one is refused before it trains. Whoever overrides
        `evaluate` of another evaluation overrides this too."""
        return None

    def close(self) -> None:  # noqa: B027 - many have nothing to close
        """End what it holds, such as the processes of rewards. Called once, also after an error."""
