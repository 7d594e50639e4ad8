"""State that a component or a plugin's hooks keep in the checkpoint."""

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
        """Nested dicts and lists of JSON values and numpy arrays of numbers; keys are text.

        Arrays are stored as such, each under its keys: `weights/embed`. A tuple comes back as a list. What is too large
        to be there twice goes into `StateParts`, which come back as such.
        """
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""
        ...


class StateParts(Iterable[Mapping[str, object]]):
    """A sequence in a component's state that is never there as a whole, but part by part.

    A checkpoint writes each part before it asks for the next one. Those it gives back are read from its files one after
    another, as they are iterated over: in `load_state_dict`, not later, for checkpoints are deleted.
    make: an iterator over the parts from the first one on, each a state like any other, whenever it is called.
    is_frozen: whether nothing of what it makes parts of changes any more while training goes on; any thread may ask.
    With `checkpoint.async` such parts are made while they are written, and all others at the step, where all are there
    at once.
    """

    def __init__(self, make: Callable[[], Iterator[Mapping[str, object]]], *, is_frozen: bool = False) -> None:
        self._make = make
        self.is_frozen = is_frozen

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        return self._make()


def refuse_other_data(state: Mapping[str, object], fingerprint: str, message: str) -> None:
    """Compare data with that of a checkpoint, whose `state` has its fingerprint under `data`.

    Raises CheckpointError with the message when they are not the same.
    """
    if state.get("data") != fingerprint:
        raise CheckpointError(message)
