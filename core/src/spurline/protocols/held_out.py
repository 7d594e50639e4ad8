"""Define how held-out data measures a backend.

An implementation is either a source's own, made of `data.eval`, or a component (`spurline.protocols.evaluation`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spurline.protocols.backend import Backend
    from spurline.protocols.lengths import Longest


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
