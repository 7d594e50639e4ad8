"""State that a component keeps in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """A component with state, which the run saves under `components/KIND/NAME`.

    Asked are the source, the mini-batches, the loss and the trackers. What a source builds for itself (advantages,
    environments, engines) is part of the source's own state; collators and prefetches keep none.
    """

    def state_dict(self) -> dict[str, object]:
        """Nested dicts and lists of JSON values and numpy arrays; arrays are stored as such, not as numbers in text."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""
        ...
