"""State that a component keeps in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """A component with state; the run saves it under `components/KIND/NAME.json`."""

    def state_dict(self) -> dict[str, object]:
        """JSON-able state."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""
        ...
