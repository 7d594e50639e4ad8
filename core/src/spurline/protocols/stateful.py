"""Define the state that a component or a plugin's hooks keep in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from spurline.errors import CheckpointError


@runtime_checkable
class Stateful(Protocol):
    """A component with state, which the run saves under `components/KIND/NAME`; or what a hook gave `Run.keep_state`.

    The run asks the source, the mini-batches, the loss and the trackers for theirs. What a source builds for itself
    (advantages, environments, engines) is part of the source's own state; collators and prefetches keep none.
    """

    def state_dict(self) -> dict[str, object]:
        """Return nested dicts and lists of JSON values and numpy arrays of numbers; keys are text.

        A tuple comes back as a list. A state that is too large for two copies in memory goes into `StateParts`.
        """
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""
        ...


class StateParts(Iterable[Mapping[str, object]]):
    """A sequence in a component's state that is never in memory as a whole.

    A checkpoint writes each part before it asks for the next one. A restored sequence reads its parts from files while
    it is iterated over, so iterate in `load_state_dict`: checkpoints are deleted later.

    Args:
        make: Returns an iterator over the parts from the first one on, each a state like any other.
        is_frozen: Whether the parts no longer change while training goes on, so that another thread may make them. With
            `checkpoint.async` all other parts are made at the step, where all are in memory at once.
    """

    def __init__(self, make: Callable[[], Iterator[Mapping[str, object]]], *, is_frozen: bool = False) -> None:
        self._make = make
        self.is_frozen = is_frozen

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        return self._make()


def refuse_other_data(state: Mapping[str, object], fingerprint: str, message: str) -> None:
    """Raise CheckpointError with this message unless a checkpoint's state has this fingerprint under `data`."""
    if state.get("data") != fingerprint:
        raise CheckpointError(message)
