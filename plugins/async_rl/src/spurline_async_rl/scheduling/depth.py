"""Decide how many untrained groups there should be, so that they are fresh and the trainer does not lack any.

Place on the way: how long the trainer lacked groups from one batch to the next, and whether one was held back -> this
-> one more condition of the scheduler's admission. It can only refuse what the bound allows, so it is no part of the
bound's proof. It knows no clock: the source and the simulation tell it the same seconds.

Where training is the slower side, groups that run ahead to the bound wait in the buffer until they are S updates old,
and nothing is won by it. The depth D is about the number of untrained groups that is just enough. It holds groups back
only while the trainer is busy: engines that stand still while it waits would be lost time. With every batch it

    rises by K / 4 + 2 B w     where the trainer lacked groups for a share w of the time, and D held one back for this
                               batch or one of the 8 before,
    falls by B / 128           where it lacked none.

In balance both are equal on average, so that the trainer lacks groups for at most (B / 128) / (2 B) = 0.4 % of its time
because of D, as far as it lacks them within 8 batches. Where generation is the slower side it lacks some all the time,
and D rises to (S + 1) B, or to where it holds nothing back. That the trainer waits for a straggler that is about to
become too old says nothing about D: it would wait for that one at any depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

Depth = Literal["auto", "full"] | int
"""`auto`: as many untrained groups as keep the trainer busy. `full`: as many as the bound allows. Or a number."""

_LACKING = 1e-3
"""Share of the time from which on the trainer counts as having lacked groups."""
_RISE_PER_WAIT = 2.0
"""Batches by which D rises for a trainer that only waited."""
_FALL = 1 / 128
"""Batches by which D falls with each batch that lacked no group."""
_MEMORY = 8
"""Batches for which a group that was held back may be lacking: a buffer empties slowly."""


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
        # The groups of the next batch, and as many as run.
        start = {"auto": batch_size + max_running, "full": self._most}
        self.value = min(self._most, float(start[depth] if isinstance(depth, str) else max(depth, batch_size)))
        # Batches since one for which a group was held back; 0 is the one to come.
        self._held_back_ago = _MEMORY + 1

    @property
    def groups(self) -> int:
        """Untrained groups up to which a further one may start."""
        return math.ceil(self.value)

    def note_held_back(self) -> None:
        """Note that a group would have started but for the depth."""
        self._held_back_ago = 0

    def adapt(self, lacked_s: float, seconds: float) -> None:
        """Adapt D after a batch: in `seconds` since the last one the trainer lacked groups for `lacked_s`."""
        held_back = self._held_back_ago <= _MEMORY
        self._held_back_ago += held_back
        if not self._adapts:
            return
        share = min(1.0, lacked_s / seconds) if seconds > 0 else 0.0
        if share <= _LACKING:
            self._set(self.value - _FALL * self._batch_size)
        elif held_back:
            self._set(self.value + self._rise + _RISE_PER_WAIT * self._batch_size * share)

    def state_dict(self) -> dict[str, object]:
        """Return the state; empty for a fixed depth."""
        return {"value": self.value, "held_back_ago": self._held_back_ago} if self._adapts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved depth, within this run's limits; a fixed depth stays."""
        if self._adapts and state:
            self._set(float(state["value"]))
            self._held_back_ago = int(state["held_back_ago"])

    def _set(self, value: float) -> None:
        self.value = min(self._most, max(self._least, value))
