"""State that a component or a plugin's hooks keep in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from spurline.errors import CheckpointError


@runtime_checkable
class Stateful(Protocol):
    """A component with state, which the run saves under `components/KIND/NAME`; or what a hook gave `Run.keep_state`.

    The run asks the source, the mini-batches, the loss and the trackers for theirs. What a source builds for itself
    (advantages, environments, engines) is part of the source's own state; collators and prefetches keep none.
    """

    def state_dict(self) -> dict[str, object]:
        """Nested dicts and lists of JSON values and numpy arrays of numbers; keys are text.

        Arrays are stored as such, each under its keys: `weights/embed`. A tuple comes back as a list.
        """
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""
        ...


def refuse_other_data(state: Mapping[str, object], fingerprint: str, message: str) -> None:
    """Compare data with that of a checkpoint, whose `state` has its fingerprint under `data`.

    Raises CheckpointError with the message when they are not the same.
    """
    if state.get("data") != fingerprint:
        raise CheckpointError(message)
