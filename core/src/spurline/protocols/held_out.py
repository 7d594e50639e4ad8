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

    Factory: `Class(config, context=EvaluationContext)`. It reads its data there, and starts nothing.

    measures_copies: Whether it asks engines with weights of their own, which swapped parameters do not reach.
    """

    measures_copies: bool = False

    @abstractmethod
    def summary(self) -> Mapping[str, Any]:
        """Return JSON-able facts about the data; see `spurline.data.token_store`."""

    def longest(self) -> Longest | None:
        """Return its longest sequence, as a source does; None if its batches tell."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that changes with the held-out data, so that a resume says if scores do not compare."""

    @abstractmethod
    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return finite metrics, and sample answers: prompt, response, reference and scores.

        The run puts `eval/` or `eval/NAME/` before the names, and adds `time` in seconds.
        """

    def metrics(self) -> Collection[str] | None:
        """Return the names of all that `evaluate` may measure; None if only an evaluation tells.

        A run whose `checkpoint.keep_best` or `stop_when` names another metric is refused before it trains.
        """
        return None

    def close(self) -> None:  # noqa: B027 - many have nothing to close
        """End what it has started, such as processes of rewards. Called once, also after an error."""
