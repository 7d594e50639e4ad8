"""Decide which group may start and which batch may be trained, so that no token gets older than the bound.

A pure state machine: the caller tells what happened (admitted, finished, left out, published) and asks what may happen
next. It knows no clock, thread, engine or prompt, so that the source, the simulation and the tests run the same code.

Why the bound holds. A group admitted with version v has the deadline v + S: the last batch whose tokens of version v,
the oldest it can have, are at most S updates old. Let batch t be the next one. Always, for every d >= t:

    untrained groups with a deadline up to d  <=  (d - t + 1) * B                                              (1)

so that the batches t, t + 1, ..., d have room for all of them, and no deadline is before t. Admission keeps (1): a new
group has the latest deadline of all, v + S, and is admitted only while all untrained groups number fewer than
(v + S - t + 1) * B. Leaving a group out makes the left side smaller, and so does a restart, after which groups that
were under way are admitted again, with later deadlines, before any other.
Taking a batch keeps (1) if afterwards, with d - t in place of d - t + 1, it still holds: `window` waits for exactly
that, and takes groups of the earliest deadlines first, after which it holds whenever the groups with the earliest
deadlines are finished: so waiting always ends. `fifo` takes groups in the order of their draws, which is that of their
admission: a group had p < (v + S - t + 1) * B others before it when it was admitted, never gets more, not even by a
restart, and is trained in batch t + p // B <= v + S or before. Where draws run out, a batch takes all groups there are,
and fills up with ones that were left out since the last batch, so that their deadlines are not before t either.
The admission rule is that of AReaL (Fu et al. 2025, arXiv:2505.24298), which bounds the average; (1) bounds each group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spurline_async_rl.scheduling.limits import SchedulerLimits


@dataclass
class Untrained:
    """An admitted group that no batch has taken. version: of the weights when it was admitted."""

    draw: int
    version: int
    finished: bool = False


class Scheduler:
    """version: of the newest published weights. taken: batches taken so far, which is the number of the next one."""

    def __init__(self, limits: SchedulerLimits, *, version: int = 0, taken: int = 0) -> None:
        self.limits = limits
        self.version = version
        self.taken = taken
        self._untrained: dict[int, Untrained] = {}
        self._num_finished = 0
        self._pending: set[int] = set()
        self._fillers: list[int] = []
        self._left_out = 0

    @property
    def num_running(self) -> int:
        """Groups under way."""
        return len(self._untrained) - self._num_finished

    @property
    def num_buffered(self) -> int:
        """Finished groups that no batch has taken."""
        return self._num_finished

    @property
    def untrained(self) -> Sequence[Untrained]:
        """Admitted groups that no batch has taken, by draw."""
        return sorted(self._untrained.values(), key=lambda group: group.draw)

    @property
    def fillers(self) -> Sequence[int]:
        """Draws left out since the last batch that could fill the next one, earliest first."""
        return sorted(self._fillers)

    def may_admit(self) -> bool:
        """Whether one more group may start now."""
        limits = self.limits
        room = limits.most_untrained(self.version, self.taken)
        beyond_this_batch = room - limits.batch_size
        return (
            self.num_running < limits.max_running
            and len(self._untrained) < room
            and self._left_out + len(self._untrained) < limits.draw_limit + beyond_this_batch
        )

    def admit(self, draw: int) -> None:
        """A group starts, with the published weights."""
        assert self.may_admit(), f"draw {draw} may not start: {self}"
        assert draw not in self._untrained, draw
        self._settle_pending(draw)
        self._untrained[draw] = Untrained(draw, self.version)

    def finish(self, draw: int) -> None:
        """A group has its rewards and can be trained on."""
        group = self._untrained[draw]
        assert not group.finished, draw
        group.finished = True
        self._num_finished += 1

    def leave_out(self, draw: int, *, counts: bool = True, can_fill: bool = False) -> None:
        """A group will not be trained on and gives its place back.

        counts: it uses up one of the draws that a batch may take. can_fill: it may be used where these run out.
        """
        assert not self._untrained.pop(draw).finished, draw
        self._left_out += counts
        if can_fill:
            self._fillers.append(draw)

    def pass_over(self, draw: int) -> None:
        """A prompt was drawn, or drawn again after a restart, and will not start: its row cannot be used."""
        self._settle_pending(draw)

    def publish(self, version: int) -> None:
        """Weights of this version are what engines generate with from now on."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version

    def next_batch(self) -> list[int] | None:
        """The draws of the next batch in draw order, or None while it has to wait."""
        limits = self.limits
        if self._num_finished + len(self._fillers) < limits.batch_size:
            return None
        candidates = self._candidates()[: limits.batch_size]
        if len(candidates) == limits.batch_size:
            chosen = {group.draw for group in candidates}
            return sorted(chosen) if self._keeps_deadlines(chosen) else None
        if self._draws_used_up() and len(candidates) + len(self._fillers) >= limits.batch_size:
            missing = limits.batch_size - len(candidates)
            return sorted([*(group.draw for group in candidates), *self.fillers[:missing]])
        return None

    def is_exhausted(self) -> bool:
        """Whether the next batch cannot be filled: its draws are used up, and too few of them can be trained on."""
        return self._draws_used_up() and self.num_buffered + len(self._fillers) < self.limits.batch_size

    def take(self) -> list[int]:
        """Take the next batch, which must be there."""
        chosen = self.next_batch()
        assert chosen is not None, f"no batch: {self}"
        for draw in chosen:
            if self._untrained.pop(draw, None) is not None:
                self._num_finished -= 1
        self.taken += 1
        self._fillers = []
        self._left_out = 0
        return chosen

    def restore(
        self, buffered: Sequence[tuple[int, int]], fillers: Sequence[int], left_out: int, pending: Iterable[int] = ()
    ) -> None:
        """Begin with finished groups (draw, version when admitted) of a checkpoint, and what its next batch had left
        out. pending: groups that were under way then; they are admitted anew, in order, before any further draw."""
        assert not self._untrained, "restored into a scheduler that has run"
        self._untrained = {draw: Untrained(draw, version, finished=True) for draw, version in buffered}
        self._num_finished = len(self._untrained)
        self._pending = {*pending}
        self._fillers = [*fillers]
        self._left_out = left_out

    @property
    def num_left_out(self) -> int:
        """Draws since the last batch that were used up without a group to train on."""
        return self._left_out

    def _settle_pending(self, draw: int) -> None:
        assert draw == min(self._pending, default=draw), f"draw {draw} cannot start before {sorted(self._pending)}"
        self._pending.discard(draw)

    def _draws_used_up(self) -> bool:
        """Nothing runs and nothing more may be drawn for the next batch."""
        return self.num_running == 0 and not self.may_admit() and self._left_out > 0

    def _candidates(self) -> list[Untrained]:
        """Finished groups in the order in which they may be taken."""
        if self.limits.order == "window":
            finished = [group for group in self._untrained.values() if group.finished]
            return sorted(finished, key=lambda group: (group.version, group.draw))
        candidates: list[Untrained] = []
        first_pending = min(self._pending, default=None)
        for group in self.untrained:
            if not group.finished or (first_pending is not None and group.draw > first_pending):
                break
            candidates.append(group)
        return candidates

    def _keeps_deadlines(self, chosen: set[int]) -> bool:
        """Whether the groups that are left can all be trained in time when these are taken now: (1) of the module."""
        if self.limits.at_bound == "mask":
            return True
        left = sorted(group.version for draw, group in self._untrained.items() if draw not in chosen)
        for count, version in enumerate(left, start=1):
            deadline = version + self.limits.max_staleness
            if count > (deadline - self.taken) * self.limits.batch_size:
                return False
        return True

    def __repr__(self) -> str:
        return (
            f"Scheduler(version={self.version}, taken={self.taken}, running={self.num_running}, "
            f"buffered={self.num_buffered}, left_out={self._left_out}, limits={self.limits})"
        )
