"""Decide which group may start and which batch may be trained, so that no token gets older than the bound.

A pure state machine, and the only place that knows what became of each drawn prompt: the caller tells what happened
(admitted, ended, published) and asks what may happen next. It knows no clock, thread, engine or prompt, so that the
source, the simulation and the tests run the same code.

    pending -> running -> buffered -> trained at a step
                       -> filtered -> trained at a step (where draws run out)
                       -> given up | skipped

A batch is numbered by the updates before it: batch 0 is the first. Weights are numbered by the updates in them:
version 0 is what the run began with. A token of version v in batch d is d - v updates old, its staleness.

Why the bound holds. A group admitted with version v has the deadline v + S: the last batch whose tokens of version v,
the oldest it can have, are at most S updates old. Let batch t be the next one. Always, for every d >= t:

    untrained groups with a deadline up to d  <=  (d - t + 1) * B                                              (1)

so that the batches t, t + 1, ..., d have room for all of them, and no deadline is before t. Admission keeps (1): a new
group has the latest deadline of all, v + S, and is admitted only while all untrained groups number fewer than
(v + S - t + 1) * B. Filtering a group or giving it up makes the left side smaller, and so does a restart, after which
groups that were under way are admitted again, with later deadlines, before any other.
Taking a batch keeps (1) if afterwards, with d - t in place of d - t + 1, it still holds: `window` waits for exactly
that, and takes groups of the earliest deadlines first, after which it holds whenever the groups with the earliest
deadlines are finished: so waiting always ends. `fifo` takes groups in the order of their draws, which is that of their
admission: a group had p < (v + S - t + 1) * B others before it when it was admitted, never gets more, not even by a
restart, and is trained in batch t + p // B <= v + S or before. Where draws run out, a batch takes all groups there are,
and fills up with ones that were filtered since the last batch, so that their deadlines are not before t either.
The admission rule is that of AReaL (Fu et al. 2025, arXiv:2505.24298), which bounds the average; (1) bounds each group.

Admission also keeps to a depth D: while training does not wait for a batch, a group starts only if fewer than D are
untrained. The depth only refuses, so (1) stands; and it never refuses while training waits, so that waiting ends as
without it. That it refuses does not mean that draws have run out.
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
    """The state of a drawn prompt. TRAINED stands for every positive number, the 1-based step that trained it."""

    PENDING = 0
    RUNNING = -1
    BUFFERED = -2
    FILTERED = -3
    GIVEN_UP = -4
    SKIPPED = -5
    TRAINED = 1


_NEXT: Mapping[State, tuple[State, ...]] = {
    State.PENDING: (State.RUNNING, State.SKIPPED),
    State.RUNNING: (State.BUFFERED, State.FILTERED, State.GIVEN_UP, State.SKIPPED),
    State.BUFFERED: (State.TRAINED,),
    State.FILTERED: (State.TRAINED,),
}


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of the scheduler.

    Attributes:
        max_staleness: S.
        batch_size: Groups per batch, B.
        max_running: Groups generated at the same time, K.
        order: `fifo` takes groups as they were drawn; `window` lets a finished group overtake where that cannot make
            another one too old.
        draw_limit: Prompts that may be drawn for one batch before filtered groups are used.
        num_batches: Batches of the whole run.
        depth: Untrained groups that admission keeps to, at least B; `auto` follows the waits of the trainer.
        at_bound: `wait` for groups that would become too old. `mask` takes finished groups first; tokens that become
            too old meanwhile are masked.
    """

    max_staleness: int
    batch_size: int
    max_running: int
    order: Order
    draw_limit: int
    num_batches: int
    depth: Depth = "full"
    at_bound: AtBound = "wait"

    def most_untrained(self, version: int, taken: int) -> int:
        """Return the groups that may be admitted and untrained with weights of `version`, after `taken` batches.

        They fill the batches up to number version + S, the last one that may train on tokens of this version.
        """
        last = min(version + self.max_staleness, self.num_batches - 1)
        return (last - taken + 1) * self.batch_size


class Scheduler:
    """The state of every prompt of one run, from the first draw to the last, in four bytes each.

    `version` is the version of the newest published weights, `taken` the number of batches taken so far, and `depth`
    the number of untrained groups that admission keeps to.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.depth = AdmissionDepth(limits.depth, limits.max_staleness, limits.batch_size, limits.max_running)
        self.version = 0
        self.taken = 0
        self.num_drawn = 0
        self._states: NDArray[np.int32] = np.zeros(1024, np.int32)
        # Prompts on their way, with the version of the weights when they were admitted.
        self._pending: deque[int] = deque()
        self._running: dict[int, int] = {}
        self._buffered: dict[int, int] = {}
        # Draws filtered since the last batch.
        self._filtered: list[int] = []
        self._num_given_up = 0
        self._is_awaited = False

    @property
    def num_running(self) -> int:
        """Groups under way."""
        return len(self._running)

    @property
    def num_buffered(self) -> int:
        """Finished groups that no batch has taken."""
        return len(self._buffered)

    @property
    def num_untrained(self) -> int:
        """Admitted groups that no batch has taken, which (1) is about."""
        return len(self._running) + len(self._buffered)

    @property
    def num_ended(self) -> int:
        """Prompts that were trained, filtered, given up or skipped."""
        return self.num_drawn - len(self._pending) - self.num_untrained

    @property
    def filtered(self) -> list[int]:
        """Groups filtered since the last batch, earliest first; they fill up the next one where draws run out."""
        return sorted(self._filtered)

    def draw(self) -> int:
        """Return the prompt to start next: the earliest that a restart interrupted, else a new one.

        It is pending until it is admitted or skipped.
        """
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
        """Drop the pending prompt, whose row cannot be used."""
        self._leave_pending(draw)
        self._move(draw, State.SKIPPED)

    def end(self, draw: int, state: State) -> None:
        """End the group under way: buffered, filtered (it may fill up the next batch), given up, or skipped.

        Skipped prompts use up none of the draws that a batch may take.
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

    def publish(self, version: int) -> None:
        """Note that engines generate with weights of this version from now on."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version
        self._note_depth()

    def await_batch(self) -> None:
        """Note that training waits: until the next batch is taken, the depth holds no group back."""
        self._is_awaited = True

    def next_batch(self) -> list[int] | None:
        """Return the draws of the next batch in draw order, or None while it has to wait."""
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
        """Return whether the draws of the next batch are used up, and too few of them can be trained on."""
        return self._draws_used_up() and self.num_buffered + len(self._filtered) < self.limits.batch_size

    def take(self, wait_s: float = 0.0, seconds: float = 0.0) -> list[int]:
        """Take the next batch, which must be there, for the step that `taken` counts afterwards.

        `seconds` have passed since the batch before, and for `wait_s` of them training waited for this one.
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
        # With `window`, a batch that leaves finished groups over has waited for a group at its deadline, at any depth.
        # With `fifo` it may have waited for a group that began too late.
        lacked_groups = not self._buffered or self.limits.order == "fifo"
        self.depth.adapt(wait_s if lacked_groups else 0.0, seconds)
        self._note_depth()
        return chosen

    def in_state(self, state: State) -> list[int]:
        """Return the draws in this state, ascending."""
        return np.flatnonzero(self._kinds() == state).tolist()

    def trained(self) -> dict[int, int]:
        """Return step by draw, of all prompts that were trained on."""
        return {draw: int(self._states[draw]) for draw in self.in_state(State.TRAINED)}

    def counts(self) -> dict[str, int]:
        """Return the number of prompts by the name of their state; the sum is `num_drawn`."""
        kinds = self._kinds()
        return {state.name.lower(): int((kinds == state).sum()) for state in State}

    def state_dict(self) -> dict[str, object]:
        return {
            "ledger": {"states": self._states[: self.num_drawn].copy()},
            "buffered": [[draw, self._buffered[draw]] for draw in sorted(self._buffered)],
            "fillers": self.filtered,
            "left_out": self._num_used_up(),
            "depth": self.depth.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, keep_groups: bool = True) -> None:
        """Go on after the last batch taken, with the weights made from it.

        Groups that were under way are pending again, before any further draw. So are finished ones without
        `keep_groups`: (1) need not hold for them under other limits than at their admission.
        """
        assert not self.num_drawn, f"restored into a scheduler that has run: {self}"
        states = np.array(state["ledger"]["states"], np.int32)
        buffered, fillers = state["buffered"], state["fillers"]
        num_given_up = int(state["left_out"]) - len(fillers)
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
        self._num_given_up = num_given_up
        # Earlier checkpoints have none.
        if "depth" in state:
            self.depth.load_state_dict(state["depth"])
        self.check()

    def check(self) -> None:
        """Assert that no prompt is lost or counted twice: the prompts on their way agree with the states."""
        on_their_way = {State.PENDING: self._pending, State.RUNNING: self._running, State.BUFFERED: self._buffered}
        for state, held in on_their_way.items():
            known, kept = self.in_state(state), sorted(held)
            assert known == kept, f"{state.name.lower()} are draws {kept}, but by their states {known}: {self}"

    def _kinds(self) -> NDArray[np.int32]:
        return np.minimum(self._states[: self.num_drawn], State.TRAINED)

    def _move(self, draw: int, state: State | int) -> None:
        """Put the prompt into this state, or note the 1-based step that trains it."""
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
        """Return whether places, bound and draws allow one more group."""
        limits = self.limits
        room = limits.most_untrained(self.version, self.taken)
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
        """Return the draws since the last batch that brought no group to train on."""
        return len(self._filtered) + self._num_given_up

    def _draws_used_up(self) -> bool:
        """Return whether no group runs and none may be drawn for the next batch."""
        return self.num_running == 0 and not self._has_room() and self._num_used_up() > 0

    def _candidates(self) -> list[int]:
        """Return finished groups in the order in which they may be taken."""
        if self.limits.order == "window":
            return sorted(self._buffered, key=lambda draw: (self._buffered[draw], draw))
        first_missing = min([*self._running, *self._pending], default=self.num_drawn)
        return [draw for draw in sorted(self._buffered) if draw < first_missing]

    def _lacks_due_group(self) -> bool:
        """Return whether a running group would be too old after the next batch, which then has to wait for it.

        `_keeps_deadlines` finds that too, but looks at every group.
        """
        if self.limits.at_bound == "mask" or not self._running:
            return False
        # Groups are in the order of admission, so the first one has the oldest version.
        oldest = next(iter(self._running.values()))
        return oldest + self.limits.max_staleness <= self.taken

    def _keeps_deadlines(self, chosen: set[int]) -> bool:
        """Return whether taking these groups now leaves all others trainable in time: (1) of the module."""
        if self.limits.at_bound == "mask":
            return True
        untrained = self._running | self._buffered
        left = sorted(version for draw, version in untrained.items() if draw not in chosen)
        # A group of version v has the deadline v + S, so (1) for a later batch counts the groups up to its version.
        bound, size = self.limits.max_staleness - self.taken, self.limits.batch_size
        return all(count <= (version + bound) * size for count, version in enumerate(left, start=1))

    def __repr__(self) -> str:
        return (
            f"Scheduler(version={self.version}, taken={self.taken}, running={self.num_running}, "
            f"buffered={self.num_buffered}, used_up={self._num_used_up()}, depth={self.depth.groups}, "
            f"limits={self.limits})"
        )
