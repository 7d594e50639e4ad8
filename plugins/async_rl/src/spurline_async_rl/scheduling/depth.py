"""Limit the number of untrained groups, so that groups are trained while fresh and the trainer still has enough groups.

If training is slower than generation, groups that start early only get old in the buffer. So no group starts while the
number of untrained groups is at least the depth D. This limit applies only while the trainer is busy, because engines
should never be idle while the trainer waits. B is the number of groups per batch, K the number of groups that may run
at a time, and S the largest allowed staleness (`max_staleness`). After every batch, D

    rises by K / 4 + 2 B w     if the trainer lacked groups for a share w of the time, and D held a group back for this
                               batch or one of the 8 batches before,
    falls by B / 128           if the trainer lacked no groups.

In balance, the rises and falls cancel out. The trainer then lacks groups for at most (B / 128) / (2 B) = 0.4 % of its
time because of D. If generation is slower than training, D rises to (S + 1) B, or until it holds no group back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

Depth = Literal["auto", "full"] | int
"""A number of untrained groups, `auto` (as many as keep the trainer busy), or `full` (as many as staleness allows)."""

_LACKING = 1e-3
"""The trainer lacked groups if it waited for more than this share of the time."""
_RISE_PER_WAIT = 2.0
"""D rises by this many batches, times the share of the time that the trainer waited, and by K / 4."""
_FALL = 1 / 128
"""D falls by this part of a batch."""
_MEMORY = 8
"""D may rise for this many batches after it held a group back, because a buffer empties slowly."""


class AdmissionDepth:
    """The depth D of one run. `value` is D, from B to (S + 1) B, and may be a fraction."""

    def __init__(self, depth: Depth, max_staleness: int, batch_size: int, max_running: int) -> None:
        self._adapts = depth == "auto"
        self._batch_size = batch_size
        self._rise = max_running / 4
        self._most = float((max_staleness + 1) * batch_size)
        self._least = min(self._most, batch_size + max(1.0, max_running / 4))
        start = {"auto": batch_size + max_running, "full": self._most}
        self.value = min(self._most, float(start[depth] if isinstance(depth, str) else max(depth, batch_size)))
        # Batches taken since a group was last held back.
        self._held_back_ago = _MEMORY + 1

    @property
    def groups(self) -> int:
        """Return the number of untrained groups at which no more groups start."""
        return math.ceil(self.value)

    def note_held_back(self) -> None:
        """Note that the depth alone kept a group from starting."""
        self._held_back_ago = 0

    def adapt(self, lacked_s: float, seconds: float) -> None:
        """Adapt D after a batch. The trainer lacked groups for `lacked_s` of the `seconds` since the previous batch."""
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
        return {"value": self.value, "held_back_ago": self._held_back_ago} if self._adapts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved depth, within this run's limits. A fixed depth does not change."""
        if self._adapts and state:
            self._set(float(state["value"]))
            self._held_back_ago = int(state["held_back_ago"])

    def _set(self, value: float) -> None:
        self.value = min(self._most, max(self._least, value))
