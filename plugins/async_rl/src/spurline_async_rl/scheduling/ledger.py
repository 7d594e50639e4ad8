"""What became of every prompt that was drawn: exactly one state each, from the first draw of the run to the last.

    pending -> running -> buffered -> trained at a step
                       -> filtered -> trained at a step (where nothing better was left)
                       -> quarantined | skipped

Four bytes per draw, and part of the checkpoint. Pure bookkeeping: it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class State(IntEnum):
    """Of a drawn prompt; positive numbers are the step that trained on it."""

    PENDING = 0
    RUNNING = -1
    BUFFERED = -2
    FILTERED = -3
    QUARANTINED = -4
    SKIPPED = -5


_ALLOWED: Mapping[State, tuple[State, ...]] = {
    State.PENDING: (State.RUNNING, State.SKIPPED),
    State.RUNNING: (State.BUFFERED, State.FILTERED, State.QUARANTINED, State.SKIPPED, State.PENDING),
    State.BUFFERED: (),
    State.FILTERED: (),
    State.QUARANTINED: (),
    State.SKIPPED: (),
}
"""Where a prompt may go; buffered and filtered ones may also be trained on."""


class Ledger:
    """States by draw number."""

    def __init__(self) -> None:
        self._states: NDArray[np.int32] = np.zeros(1024, np.int32)
        self._counts: Counter[str] = Counter()
        self._num_drawn = 0

    @property
    def num_drawn(self) -> int:
        """Draws so far; the next one has this number."""
        return self._num_drawn

    def draw(self) -> int:
        """One more prompt is drawn; its number."""
        if self._num_drawn == len(self._states):
            self._states = np.concatenate([self._states, np.zeros_like(self._states)])
        number = self._num_drawn
        self._num_drawn += 1
        self._counts["pending"] += 1
        return number

    def move(self, draw: int, state: State) -> None:
        """The prompt is now in this state."""
        before = self._state(draw)
        allowed = isinstance(before, State) and state in _ALLOWED[before]
        assert allowed, f"draw {draw} cannot go from {_name(before)} to {_name(state)}"
        self._set(draw, before, state)

    def train(self, draw: int, step: int) -> None:
        """The prompt is in the batch of this 1-based step."""
        before = self._state(draw)
        assert before in (State.BUFFERED, State.FILTERED), f"draw {draw} is {_name(before)} and cannot be trained on"
        assert step > 0, step
        self._set(draw, before, step)

    def in_state(self, state: State) -> list[int]:
        """Draws in this state, ascending."""
        return np.flatnonzero(self._states[: self._num_drawn] == state).tolist()

    def trained(self) -> Mapping[int, int]:
        """Step by draw, of all prompts that were trained on."""
        draws = np.flatnonzero(self._states[: self._num_drawn] > 0)
        return dict(zip(draws.tolist(), self._states[draws].tolist(), strict=True))

    def counts(self) -> dict[str, int]:
        """Prompts by state: pending, running, buffered, trained, filtered, quarantined, skipped."""
        names = ["pending", "running", "buffered", "trained", "filtered", "quarantined", "skipped"]
        return {name: self._counts[name] for name in names}

    def check(self, *, running: int, buffered: int) -> None:
        """Assert that no prompt was lost or counted twice, here or in the scheduler, which has so many."""
        states = self._states[: self._num_drawn]
        recount = {_name(state): int((states == state).sum()) for state in State}
        recount["trained"] = int((states > 0).sum())
        counts = self.counts()
        assert counts == recount, f"counted {counts}, the ledger holds {recount}"
        assert sum(counts.values()) == self._num_drawn, f"{self._num_drawn} drawn, {counts}"
        known = (counts["running"], counts["buffered"])
        assert known == (running, buffered), f"the scheduler has {running} running, {buffered} buffered; {counts}"

    def state_dict(self) -> dict[str, object]:
        return {"states": self._states[: self._num_drawn].copy()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Groups that were under way are pending again: what they had generated is gone."""
        states = np.array(state["states"], np.int32)
        states[states == State.RUNNING] = State.PENDING
        self._num_drawn = len(states)
        self._states = np.concatenate([states, np.zeros(max(1024, len(states)), np.int32)])
        self._counts = Counter({_name(state): int((states == state).sum()) for state in State})
        self._counts["trained"] = int((states > 0).sum())

    def _state(self, draw: int) -> State | int:
        assert 0 <= draw < self._num_drawn, f"draw {draw} of {self._num_drawn}"
        return _decode(int(self._states[draw]))

    def _set(self, draw: int, before: State | int, after: State | int) -> None:
        self._counts[_name(before)] -= 1
        self._counts[_name(after)] += 1
        self._states[draw] = int(after)


def _decode(value: int) -> State | int:
    return State(value) if value <= 0 else value


def _name(state: State | int) -> str:
    return state.name.lower() if isinstance(state, State) else "trained"
