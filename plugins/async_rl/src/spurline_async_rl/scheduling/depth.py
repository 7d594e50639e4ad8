"""Decide how many untrained groups there should be, so that they are fresh and the trainer hardly waits for them.

Place on the way: how long the trainer waited between two publishes, and whether a group was held back -> this -> one
more condition of the scheduler's admission. It can only refuse what the bound allows, so it is no part of the bound's
proof. It knows no clock: the source and the simulation tell it the same seconds.

Where training is the slower side, groups that run ahead to the bound wait in the buffer until they are S updates old,
and nothing is won by it. The depth D is the number of untrained groups that is just enough: after a publish it

    rises by K / 4 + 2 B w     where the trainer waited for a share w of the time and D held a group back,
    falls by B / 128           where it did not wait.

In balance both are equal on average, so that what D costs is at most (B / 128) / (2 B) = 0.4 % of the trainer's time.
Where generation is the slower side the trainer always waits: D rises to (S + 1) B, or to where it holds nothing back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

Depth = Literal["auto", "full"] | int
"""`auto`: as many untrained groups as keep the trainer busy. `full`: as many as the bound allows. Or a number."""

_WAITED = 1e-3
"""Share of the time from publish to publish from which on the trainer counts as having waited."""
_RISE_PER_WAIT = 2.0
"""Batches by which D rises for a trainer that did nothing but wait."""
_FALL = 1 / 128
"""Of a batch."""


class AdmissionDepth:
    """Holds the depth D of one run.

    value: D, from B to (S + 1) B. It moves in fractions of a group.
    """

    def __init__(self, depth: Depth, max_staleness: int, batch_size: int, max_running: int) -> None:
        self._adapts = depth == "auto"
        self._batch_size = batch_size
        self._rise = max_running / 4
        self._most = float((max_staleness + 1) * batch_size)
        self._least = min(self._most, batch_size + max(1.0, max_running / 4))
        # While a batch is not there yet, at least max_running places are left: nothing waits for this depth.
        start = {"auto": batch_size + max_running, "full": self._most}
        self.value = min(self._most, float(start[depth] if isinstance(depth, str) else max(depth, batch_size)))
        self._held_back = self._held_back_before = False

    @property
    def groups(self) -> int:
        """Untrained groups up to which a further one may start."""
        return math.ceil(self.value)

    def note_held_back(self) -> None:
        """A group would have started but for the depth."""
        self._held_back = True

    def adapt(self, wait_s: float, seconds: float) -> None:
        """New weights are published. seconds: since the publish before, for wait_s of which the trainer waited for a
        batch that was not there."""
        held_back, self._held_back_before, self._held_back = self._held_back, self._held_back, False
        if not self._adapts:
            return
        held_back = held_back or self._held_back_before
        waited = min(1.0, wait_s / seconds) if seconds > 0 else 0.0
        if waited <= _WAITED:
            self._set(self.value - _FALL * self._batch_size)
        elif held_back:
            self._set(self.value + self._rise + _RISE_PER_WAIT * self._batch_size * waited)

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value, "held_back": [self._held_back_before, self._held_back]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the depth of another run, as far as this one's limits allow; a fixed depth stays what it is."""
        if self._adapts:
            self._set(float(state["value"]))
            self._held_back_before, self._held_back = map(bool, state["held_back"])

    def _set(self, value: float) -> None:
        self.value = min(self._most, max(self._least, value))
