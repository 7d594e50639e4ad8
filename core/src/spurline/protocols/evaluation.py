"""Held-out evaluation as a run sees it, whatever it measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from spurline.protocols.backend import Backend


class HeldOutEvaluation(Protocol):
    """Measures a backend on held-out data. Draws no random numbers that training could miss."""

    def summary(self) -> Mapping[str, Any]:
        """JSON-able facts about the data; see `spurline.data.summary`."""
        ...

    def state_dict(self) -> dict[str, object]:
        """What a resume must find again: the held-out data."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Compare with the data of the checkpoint. Raises CheckpointError when they differ."""
        ...

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics, whose names begin with `eval/`, and sample answers: prompt, response, reference and scores."""
        ...


@runtime_checkable
class EvaluatesItself(Protocol):
    """A source whose held-out data is measured in its own way, not by the loss on tokens."""

    def evaluation(self) -> HeldOutEvaluation:
        """The evaluation of `data.eval`; asked for once, and only when there is held-out data."""
        ...
