"""Define the state that a component or a plugin's hooks keep in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from spurline.errors import OtherDataError


@runtime_checkable
class Stateful(Protocol):
    """A component with state, or an object that a hook passes to `Run.keep_state`.

    The run saves the state of the source, the mini-batches, the loss and the trackers under `components/KIND/NAME`. The
    state of a source includes the states of components that it makes itself: advantages, environments and engines.
    Collators and prefetches have no state.
    """

    def state_dict(self) -> dict[str, object]:
        """Return nested dicts and lists of JSON values and numpy arrays of numbers. Keys are text.

        A tuple comes back as a list. Use `StateParts` if memory cannot hold a second copy of the state.
        """
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state that `state_dict` returned."""
        ...


class StateParts(Iterable[Mapping[str, object]]):
    """A sequence in a component's state that is never in memory as a whole.

    A checkpoint writes each part before it asks for the next one. A restored sequence reads its parts from files while
    it is iterated over. Iterate in `load_state_dict`, since the files may be deleted later.

    Args:
        make: Returns an iterator over all parts. Each part is a state as `state_dict` returns it.
        is_frozen: Whether the parts do not change while training goes on, so that another thread may make them. If
            they may change, `checkpoint.async` makes all of them during the step, and memory holds all at once.
    """

    def __init__(self, make: Callable[[], Iterator[Mapping[str, object]]], *, is_frozen: bool = False) -> None:
        self._make = make
        self.is_frozen = is_frozen

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        return self._make()


def refuse_other_data(state: Mapping[str, object], fingerprint: str, message: str) -> None:
    """Raise OtherDataError with this message unless the state has this fingerprint under `data`."""
    if state.get("data") != fingerprint:
        raise OtherDataError(message)
