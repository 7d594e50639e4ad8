"""Engines on a virtual clock: how fast groups get on, by how many run beside them.

Place on the way: admitted groups -> this -> ended groups, one at a time in the order of their ends. Knows nothing of
versions, batches or what a group is good for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise


@dataclass(frozen=True)
class Speed:
    """Work one group gets done in a second, by the number of groups on its engine.

    points: (groups, work per second), groups ascending; linear between them and constant beyond. The unit of work is
    that of the groups' work: a speed of 1 makes it seconds, tokens per second make it tokens of the longest response.
    """

    points: Sequence[tuple[float, float]] = ((1.0, 1.0),)

    def __post_init__(self) -> None:
        assert self.points, "a speed needs at least one point"
        assert all(speed > 0 for _, speed in self.points), f"speeds have to be positive: {self.points}"
        assert all(left[0] < right[0] for left, right in pairwise(self.points)), f"not ascending: {self.points}"

    def at(self, groups: int) -> float:
        place = bisect_right(self.points, groups, key=lambda point: point[0])
        if place in (0, len(self.points)):
            return self.points[max(place - 1, 0)][1]
        (left, low), (right, high) = self.points[place - 1 : place + 1]
        return low + (high - low) * (groups - left) / (right - left)


WORK_IN_SECONDS = Speed()
"""However many run, each takes the seconds that its work says."""


@dataclass
class _Engine:
    """All groups of an engine get on equally fast, so one number, the work done by each since the beginning, says when
    which of them ends. ends: that number at the end of each group, and its draw."""

    done: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class Engines:
    """Groups go to the engine with the fewest. None gets on while they are paused."""

    def __init__(self, count: int, speed: Speed) -> None:
        self._engines = [_Engine() for _ in range(count)]
        self._speed = speed
        self._engine_of: dict[int, int] = {}
        self.paused = False

    def start(self, draw: int, work: float) -> int:
        """A group begins; the number of its engine."""
        number = min(range(len(self._engines)), key=lambda place: len(self._engines[place].ends))
        engine = self._engines[number]
        heappush(engine.ends, (engine.done + work, draw))
        self._engine_of[draw] = number
        return number

    def done(self, draw: int) -> float:
        """Work done by each group of this one's engine; differences of it are what the group got done."""
        return self._engines[self._engine_of[draw]].done

    def until_end(self) -> float:
        """Seconds until the next group ends; infinite when none gets on."""
        return min((self._seconds(engine) for engine in self._engines), default=math.inf)

    def advance(self, seconds: float) -> None:
        """Time passes during which no group ends."""
        if self.paused:
            return
        for engine in self._engines:
            if engine.ends:
                # Rounding must not carry an engine beyond the end of its next group.
                engine.done = min(engine.done + seconds * self._speed.at(len(engine.ends)), engine.ends[0][0])

    def end_next(self) -> int:
        """The draw of the next group to end, which has been advanced to and is over now."""
        engine = min(self._engines, key=self._seconds)
        engine.done, draw = heappop(engine.ends)
        return draw

    def forget(self, draw: int) -> None:
        """An ended group is not asked for any more."""
        del self._engine_of[draw]

    def _seconds(self, engine: _Engine) -> float:
        if self.paused or not engine.ends:
            return math.inf
        return (engine.ends[0][0] - engine.done) / self._speed.at(len(engine.ends))
