"""Define the interface of evaluations on held-out data.

A source may have its own evaluation of `data.eval`. Other evaluations are components (`spurline.protocols.evaluation`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spurline.protocols.backend import Backend
    from spurline.protocols.dataset import Longest


class HeldOutEvaluation(ABC):
    """Measures a backend on held-out data. It does not change the random number generators of training.

    Factory: `Class(config, context=EvaluationContext)`. The factory reads the data, and starts no processes.

    measures_copies: Whether it generates with engines' copies of the weights. Swapping the backend's parameters does
        not change these copies.
    """

    measures_copies: bool = False

    @abstractmethod
    def summary(self) -> Mapping[str, Any]:
        """Return JSON-able facts about the data (see `spurline.data.token_store`)."""

    def longest(self) -> Longest | None:
        """Return the longest sequence of the data, as a source does, or None if it is not known beforehand."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that identifies the held-out data. Earlier scores stay valid only if it is unchanged."""

    @abstractmethod
    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics, all finite, and some example answers, each with prompt, response, reference and scores.

        The run puts `eval/` or `eval/NAME/` in front of the names of metrics, and adds `time` in seconds.
        """

    def metrics(self) -> Collection[str] | None:
        """Return the names of all metrics that `evaluate` may return, or None if they are not known before it runs.

        If `checkpoint.keep_best` or `stop_when` names another metric, the run is refused before it trains.
        """
        return None

    def close(self) -> None:  # noqa: B027 - many have nothing to close
        """End everything that was started, such as reward processes. This is called once, also after an error."""
