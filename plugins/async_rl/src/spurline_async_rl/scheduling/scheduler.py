"""Decide which group may start and which batch may be trained, so that no token is trained beyond the staleness bound.

The scheduler is a pure state machine. It alone knows the state of each drawn prompt. The caller tells it what happened
(admitted, ended, published) and asks what may happen next. It has no clocks, threads or engines, so the source, the
simulation and the tests can all run this code. The bound is S (`max_staleness`), and a batch has B groups.

    pending -> running -> buffered -> trained at a step
                       -> filtered -> trained at a step (if draws run out)
                       -> given up | skipped

A running or buffered group may be given back, and is then pending again.

Batch d is trained after d updates, and weights of version v contain v updates. So a token of version v in batch d is
d - v updates old. This is its staleness.

Why no token gets older than S: A group that is admitted with version v has the deadline v + S. This is the last batch
that may train the group, because its oldest tokens can have version v. If batch t is the next one, then for all d >= t:

    untrained groups with a deadline up to d  <=  (d - t + 1) * B                                              (1)

So the batches t, t + 1, ..., d have room for these groups, and no deadline is before t.

Admission keeps (1). A new group has the latest deadline of all, v + S. It is admitted only if there are fewer than
(v + S - t + 1) * B untrained groups. Filtering or giving up a group only makes the left side of (1) smaller. So do a
restart and `give_back`: they make groups pending, which are admitted again before all others, with later deadlines.

After batch t is taken, (1) must hold for t + 1, that is, with d - t in place of d - t + 1.
- `window` takes the groups with the earliest deadlines first, and waits until (1) would hold for the groups that are
  left. It holds as soon as the groups with the earliest deadlines are finished, so the wait ends.
- `fifo` takes groups in draw order, which is also their order of admission. A group that is admitted behind
  p < (v + S - t + 1) * B others never has more than p groups ahead of it, even after a restart. So it is trained no
  later than in batch t + p // B <= v + S.
If draws run out (`draw_limit`), a batch takes all finished groups, and then groups that were filtered since the last
batch. No filtered group has a deadline before t either.

AReaL (Fu et al. 2025, arXiv:2505.24298) has the same admission rule, but bounds the average age. (1) bounds every age.

The depth D (see depth.py) is a second condition: a group starts only if there are fewer than D untrained groups. It
does not apply while training waits for a batch. It can only delay admissions, so (1) still holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spurline_async_rl.scheduling.depth import AdmissionDepth, Depth

Order = Literal["fifo", "window"]
AtBound = Literal["wait", "mask"]


class State(IntEnum):
    """The state of a drawn prompt. The scheduler stores a trained prompt as the 1-based step that trained it."""

    PENDING = 0
    RUNNING = -1
    BUFFERED = -2
    FILTERED = -3
    GIVEN_UP = -4
    SKIPPED = -5
    TRAINED = 1


_NEXT: Mapping[State, tuple[State, ...]] = {
    State.PENDING: (State.RUNNING, State.SKIPPED),
    State.RUNNING: (State.BUFFERED, State.FILTERED, State.GIVEN_UP, State.SKIPPED, State.PENDING),
    State.BUFFERED: (State.TRAINED, State.PENDING),
    State.FILTERED: (State.TRAINED,),
}


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of the scheduler; see `AsyncRolloutsConfig` for `order`, `depth` and `at_bound`.

    Attributes:
        max_staleness: The bound on staleness, S.
        batch_size: Groups per batch, B.
        max_running: Groups generated at the same time, K.
        draw_limit: Prompts that may be drawn for one batch before filtered groups are used.
        num_batches: Batches of the whole run.
    """

    max_staleness: int
    batch_size: int
    max_running: int
    order: Order
    draw_limit: int
    num_batches: int
    depth: Depth = "full"
    at_bound: AtBound = "wait"


class Scheduler:
    """The states of all prompts of one run, in four bytes each. A draw is the number of a prompt in draw order, from 0.

    `version` is the version of the newest published weights. `taken` is the number of batches taken so far.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.depth = AdmissionDepth(limits.depth, limits.max_staleness, limits.batch_size, limits.max_running)
        self.version = 0
        self.taken = 0
        self.num_drawn = 0
        self._states: NDArray[np.int32] = np.zeros(1024, np.int32)
        self._pending: deque[int] = deque()
        # The version of the weights at the admission of each group, by draw.
        self._running: dict[int, int] = {}
        self._buffered: dict[int, int] = {}
        # Draws filtered since the last batch.
        self._filtered: list[int] = []
        self._num_given_up = 0
        self._is_awaited = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_buffered(self) -> int:
        return len(self._buffered)

    @property
    def num_untrained(self) -> int:
        """Return the number of running and buffered groups."""
        return len(self._running) + len(self._buffered)

    @property
    def num_ended(self) -> int:
        """Return the number of prompts that were trained, filtered, given up or skipped."""
        return self.num_drawn - len(self._pending) - self.num_untrained

    @property
    def filtered(self) -> list[int]:
        """Return the groups filtered since the last batch, in draw order."""
        return sorted(self._filtered)

    def draw(self) -> int:
        """Return the prompt to start next: the earliest pending prompt or, if none is pending, a new one."""
        if not self._pending:
            if self.num_drawn == len(self._states):
                self._states = np.concatenate([self._states, np.zeros_like(self._states)])
            self._pending.append(self.num_drawn)
            self.num_drawn += 1
        return self._pending[0]

    def may_admit(self) -> bool:
        """Return whether one more group may start now."""
        return self._has_room() and not self._exceeds_depth()

    def admit(self, draw: int) -> None:
        """Start the group of the pending prompt, with the published weights."""
        assert self.may_admit(), f"draw {draw} may not start: {self}"
        self._leave_pending(draw)
        self._move(draw, State.RUNNING)
        self._running[draw] = self.version
        self._note_depth()

    def skip(self, draw: int) -> None:
        """Drop the pending prompt, because its row cannot be used."""
        self._leave_pending(draw)
        self._move(draw, State.SKIPPED)

    def end(self, draw: int, state: State) -> None:
        """End a running group. Its new state is buffered, filtered, given up or skipped.

        A skipped prompt does not count towards `draw_limit`.
        """
        self._move(draw, state)
        version = self._running.pop(draw)
        if state is State.BUFFERED:
            self._buffered[draw] = version
        elif state is State.FILTERED:
            self._filtered.append(draw)
        elif state is State.GIVEN_UP:
            self._num_given_up += 1
        self._note_depth()

    def give_back(self, draw: int) -> None:
        """Make a running or buffered group pending, so that it is generated again."""
        self._move(draw, State.PENDING)
        self._running.pop(draw, None)
        self._buffered.pop(draw, None)
        self._pending = deque(sorted([*self._pending, draw]))

    def discard_filtered(self, draw: int) -> None:
        """Drop a filtered group, so that it is never trained. It cannot start again, since its room may be taken."""
        self._filtered.remove(draw)
        self._num_given_up += 1

    def publish(self, version: int) -> None:
        """Note that engines generate with weights of this version from now on."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version
        self._note_depth()

    def await_batch(self) -> None:
        """Note that training waits. The depth holds no group back until the next batch is taken."""
        self._is_awaited = True

    def next_batch(self) -> list[int] | None:
        """Return the draws of the next batch in draw order, or None if training must wait."""
        size = self.limits.batch_size
        if self.num_buffered + len(self._filtered) < size or self._lacks_due_group():
            return None
        chosen = self._candidates()[:size]
        missing = size - len(chosen)
        if missing == 0:
            return sorted(chosen) if self._keeps_deadlines({*chosen}) else None
        if self._draws_used_up() and missing <= len(self._filtered):
            return sorted([*chosen, *self.filtered[:missing]])
        return None

    def is_exhausted(self) -> bool:
        """Return whether the next batch can never be filled, because its draws are used up."""
        return self._draws_used_up() and self.num_buffered + len(self._filtered) < self.limits.batch_size

    def take(self, wait_s: float = 0.0, seconds: float = 0.0) -> list[int]:
        """Take the next batch, which must be ready.

        Args:
            wait_s: Seconds that training waited for this batch.
            seconds: Seconds since the previous batch was taken.
        """
        self.check()
        chosen = self.next_batch()
        assert chosen is not None, f"no batch: {self}"
        self.taken += 1
        for draw in chosen:
            self._move(draw, self.taken)
            self._buffered.pop(draw, None)
        self._filtered, self._num_given_up = [], 0
        self._is_awaited = False
        # If `window` leaves finished groups, training waited for a group at its deadline, and a larger depth would not
        # help. With `fifo`, training may have waited for a group that began too late.
        lacked_groups = not self._buffered or self.limits.order == "fifo"
        self.depth.adapt(wait_s if lacked_groups else 0.0, seconds)
        self._note_depth()
        return chosen

    def in_state(self, state: State) -> list[int]:
        """Return the draws in this state, ascending."""
        kinds = np.minimum(self._states[: self.num_drawn], State.TRAINED)
        return np.flatnonzero(kinds == state).tolist()

    def state_dict(self) -> dict[str, object]:
        return {
            "ledger": {"states": self._states[: self.num_drawn].copy()},
            "buffered": [[draw, self._buffered[draw]] for draw in sorted(self._buffered)],
            "fillers": self.filtered,
            "left_out": self._num_used_up(),
            "depth": self.depth.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, keep_groups: bool = True) -> None:
        """Restore a saved state. The run continues after the last batch that was taken.

        Groups that were running become pending. If `keep_groups` is false, finished groups become pending too. This is
        needed if the limits have changed, because (1) of the module's docstring may not hold for the finished groups.
        """
        assert not self.num_drawn, f"restored into a scheduler that has run: {self}"
        states = np.array(state["ledger"]["states"], np.int32)
        buffered, fillers = state["buffered"], state["fillers"]
        self._num_given_up = int(state["left_out"]) - len(fillers)
        states[states == State.RUNNING] = State.PENDING
        if not keep_groups:
            states[states == State.BUFFERED] = State.PENDING
            states[fillers] = State.PENDING
            buffered, fillers = [], []
        self.num_drawn = len(states)
        self._states = np.concatenate([states, np.zeros(max(1024, len(states)), np.int32)])
        self.version = self.taken = max(0, int(states.max(initial=0)))
        self._pending = deque(self.in_state(State.PENDING))
        self._buffered = {int(draw): int(version) for draw, version in buffered}
        self._filtered = [int(draw) for draw in fillers]
        # Earlier checkpoints have no depth.
        if "depth" in state:
            self.depth.load_state_dict(state["depth"])
        self.check()

    def check(self) -> None:
        """Assert that no prompt is lost or counted twice."""
        queues = {State.PENDING: self._pending, State.RUNNING: self._running, State.BUFFERED: self._buffered}
        for state, held in queues.items():
            known, kept = self.in_state(state), sorted(held)
            assert known == kept, f"draws {kept} are held as {state.name.lower()}, but {known} have this state: {self}"

    def _move(self, draw: int, state: State | int) -> None:
        """Change the state of a prompt. A positive state is the step that trains it."""
        assert 0 <= draw < self.num_drawn, f"draw {draw} of {self.num_drawn}"
        before, after = (State(min(int(value), State.TRAINED)) for value in (self._states[draw], state))
        allowed = after in _NEXT.get(before, ())
        assert allowed, f"draw {draw} cannot go from {before.name.lower()} to {after.name.lower()}"
        self._states[draw] = state

    def _leave_pending(self, draw: int) -> None:
        in_order = self._pending and draw == self._pending[0]
        assert in_order, f"draw {draw} cannot start before {[*self._pending]}"
        self._pending.popleft()

    def _has_room(self) -> bool:
        """Return whether `max_running`, the bound and `draw_limit` allow one more group."""
        limits = self.limits
        # There is room for untrained groups in all batches up to the last one that may train tokens of this version.
        last = min(self.version + limits.max_staleness, limits.num_batches - 1)
        room = (last - self.taken + 1) * limits.batch_size
        beyond_this_batch = room - limits.batch_size
        return (
            self.num_running < limits.max_running
            and self.num_untrained < room
            and self._num_used_up() + self.num_untrained < limits.draw_limit + beyond_this_batch
        )

    def _exceeds_depth(self) -> bool:
        return not self._is_awaited and self.num_untrained >= self.depth.groups

    def _note_depth(self) -> None:
        if self._has_room() and self._exceeds_depth():
            self.depth.note_held_back()

    def _num_used_up(self) -> int:
        """Return the number of draws since the last batch that were filtered or given up."""
        return len(self._filtered) + self._num_given_up

    def _draws_used_up(self) -> bool:
        """Return whether no group runs and no more prompts may be drawn for the next batch."""
        return self.num_running == 0 and not self._has_room() and self._num_used_up() > 0

    def _candidates(self) -> list[int]:
        """Return the finished groups that may be taken, in the order in which batches take them."""
        if self.limits.order == "window":
            return sorted(self._buffered, key=lambda draw: (self._buffered[draw], draw))
        first_missing = min([*self._running, *self._pending], default=self.num_drawn)
        return [draw for draw in sorted(self._buffered) if draw < first_missing]

    def _lacks_due_group(self) -> bool:
        """Return whether the next batch must wait for a running group at its deadline.

        `_keeps_deadlines` finds this too, but is slower because it looks at every group.
        """
        if self.limits.at_bound == "mask" or not self._running:
            return False
        # Groups are in admission order, so the first one has the oldest version.
        oldest = next(iter(self._running.values()))
        return oldest + self.limits.max_staleness <= self.taken

    def _keeps_deadlines(self, chosen: set[int]) -> bool:
        """Return whether (1) of the module's docstring holds after these groups are taken."""
        if self.limits.at_bound == "mask":
            return True
        untrained = self._running | self._buffered
        left = sorted(version for draw, version in untrained.items() if draw not in chosen)
        bound, size = self.limits.max_staleness - self.taken, self.limits.batch_size
        return all(count <= (version + bound) * size for count, version in enumerate(left, start=1))

    def __repr__(self) -> str:
        return (
            f"Scheduler(version={self.version}, taken={self.taken}, running={self.num_running}, "
            f"buffered={self.num_buffered}, used_up={self._num_used_up()}, depth={self.depth.groups}, "
            f"limits={self.limits})"
        )
