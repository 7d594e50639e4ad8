"""Run the scheduler through a schedule as the source does, and hold every event against its promises.

The promises are the bound on staleness, progress, and that nothing is lost. A broken one is an AssertionError. In a
schedule anything that may happen next can: groups end in any order, workers start late, the run is killed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits, State

KEPT, FILTERED, QUARANTINED, SKIPPED, UNREADABLE = "kept", "filtered", "quarantined", "skipped", "unreadable"
MAX_EVENTS = 20_000
STATES = {KEPT: State.BUFFERED, FILTERED: State.FILTERED, QUARANTINED: State.GIVEN_UP, SKIPPED: State.SKIPPED}


@dataclass
class Ran:
    """batches: draws by 0-based batch. versions: oldest weights by draw. ages: batch number less that version.
    filled_up: filtered draws that a batch filled up with. exhausted: whether a batch could not be filled."""

    batches: dict[int, list[int]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)
    filled_up: set[int] = field(default_factory=set)
    exhausted: bool = False
    counts: dict[str, int] = field(default_factory=dict)


def run_schedule(schedule: Schedule, make_scheduler: Callable[..., Scheduler] = Scheduler) -> Ran:
    """Run a schedule to its end. Raises AssertionError for a broken promise."""
    return _Driver(schedule, make_scheduler).run()


def counts_of(scheduler: Scheduler) -> dict[str, int]:
    """Return the number of prompts in each state, by the name of the state."""
    return {state.name.lower(): len(scheduler.in_state(state)) for state in State}


def trained_by(scheduler: Scheduler) -> dict[int, int]:
    """Return the step that trained each trained prompt, by draw."""
    return {draw: int(scheduler._states[draw]) for draw in scheduler.in_state(State.TRAINED)}


def assert_nothing_lost(scheduler: Scheduler) -> None:
    """Assert that each drawn prompt is in exactly one state, and that all counts agree."""
    counts = counts_of(scheduler)
    assert sum(counts.values()) == scheduler.num_drawn, counts
    assert (counts["running"], counts["buffered"]) == (scheduler.num_running, scheduler.num_buffered), counts
    ended = counts["trained"] + counts["filtered"] + counts["given_up"] + counts["skipped"]
    assert ended == scheduler.num_ended, counts


class _Driver:
    def __init__(self, schedule: Schedule, make_scheduler: Callable[..., Scheduler]) -> None:
        self.schedule = schedule
        self.make_scheduler = make_scheduler
        self.limits = schedule.limits
        self.ran = Ran()
        self.scheduler = make_scheduler(self.limits)
        self.step = 0
        self.published = 0
        self.phase = "wait"
        self.is_awaited = False
        self.running: list[int] = []
        self.counted = 0
        self.saved: dict[str, Any] | None = None

    def run(self) -> Ran:
        choices, kills = itertools.cycle(self.schedule.choices), [*self.schedule.kills]
        lived = 0
        for _ in range(MAX_EVENTS):
            lived += 1
            if kills and self.saved and lived > kills[0][0]:
                self._kill(kills.pop(0)[1])
                lived = 0
            self._check()
            if self.step == self.limits.num_batches or self.ran.exhausted:
                return self._finished()
            possible = self._possible()
            assert possible, f"deadlock: {self.scheduler}"
            possible[next(choices) % len(possible)]()
        raise AssertionError(f"no end: {self.scheduler}")

    def _possible(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        if self.phase == "train":
            events.append(self._end_training)
        elif self.phase == "publish":
            events.append(self._end_publish)
        elif self.scheduler.next_batch() is not None:
            events.append(self._take)
        elif self.scheduler.is_exhausted():
            events.append(self._give_up)
        elif not self.is_awaited:
            events.append(self._await)
        if self.scheduler.may_admit():
            events.append(self._start)
        events += [lambda draw=draw: self._end(draw) for draw in self.running]
        return events

    def _await(self) -> None:
        self.is_awaited = True
        self.scheduler.await_batch()

    def _start(self) -> None:
        depth = self.scheduler.depth.groups
        assert self.is_awaited or self.scheduler.num_untrained < depth, f"one more than {depth}: {self.scheduler}"
        draw = self.scheduler.draw()
        if self.schedule.outcome(draw) == UNREADABLE:
            self.scheduler.skip(draw)
            return
        self.scheduler.admit(draw)
        self.running.append(draw)
        # The worst case: a token is generated at once.
        self.ran.versions[draw] = self.published

    def _end(self, draw: int) -> None:
        outcome = self.schedule.outcome(draw)
        self.running.remove(draw)
        self.counted += outcome != SKIPPED
        self.scheduler.end(draw, STATES[outcome])

    def _take(self) -> None:
        batch, filled_up = self.step, set(self.scheduler.filtered)
        tried = self.counted
        self.is_awaited = False
        draws = self.scheduler.take(self.schedule.waits[batch % len(self.schedule.waits)], 1.0)
        filled_up &= set(draws)
        self.counted = self.scheduler.num_buffered
        if filled_up:
            assert tried >= self.limits.draw_limit, f"filled up after {tried} draws: {draws}"
            assert not self.running, f"filled up while {self.running} run"
        assert len(draws) == len(set(draws)) == self.limits.batch_size, f"batch {batch}: {draws}"
        assert draws == sorted(draws), f"batch {batch}: {draws}"
        for draw in draws:
            age = self.ran.ages[draw] = batch - self.ran.versions[draw]
            too_old = self.limits.at_bound == "wait" and age > self.limits.max_staleness
            assert not too_old, f"draw {draw} of batch {batch} is {age} updates old"
        if self.limits.order == "fifo":
            earlier = [draw for other in range(batch) for draw in self.ran.batches[other]]
            assert not earlier or max(earlier) < draws[0], f"batch {batch}: {draws} after {max(earlier)}"
        self.ran.batches[batch] = draws
        self.ran.filled_up |= filled_up
        self.phase = "train"

    def _end_training(self) -> None:
        self.phase = "publish"
        if (self.step + 1) % self.schedule.publish_every:
            self._end_step()

    def _end_publish(self) -> None:
        self.published = self.step + 1
        self.scheduler.publish(self.published)
        self._end_step()

    def _end_step(self) -> None:
        self.step += 1
        self.phase = "wait"
        self.saved = {
            "step": self.step,
            "scheduler": self.scheduler.state_dict(),
            "depth": self.scheduler.depth.value,
            "versions": dict(self.ran.versions),
            "counted": self.counted,
        }

    def _kill(self, places: int) -> None:
        """Kill the run, and go on from its newest checkpoint."""
        saved = self.saved
        assert saved is not None
        self.limits = replace(self.limits, max_running=places)
        self.step = self.published = saved["step"]
        self.phase = "wait"
        self.is_awaited = False
        self.scheduler = self.make_scheduler(self.limits)
        self.scheduler.load_state_dict(saved["scheduler"])
        assert self.scheduler.depth.value == self._within(saved["depth"]), f"was {saved['depth']}: {self.scheduler}"
        assert self.scheduler.taken == self.step, f"step {self.step}: {self.scheduler}"
        self.running, self.counted = [], saved["counted"]
        self.ran.versions = dict(saved["versions"])
        trained = set(trained_by(self.scheduler))
        self.ran.batches = {batch: draws for batch, draws in self.ran.batches.items() if batch < self.step}
        self.ran.ages = {draw: age for draw, age in self.ran.ages.items() if draw in trained}
        self.ran.filled_up &= trained

    def _within(self, depth: float) -> float:
        """Return the depth of a run that resumes with these limits after `depth`."""
        limits = self.limits
        most, quarter = limits.batch_size * (limits.max_staleness + 1), max(1, limits.max_running / 4)
        return max(depth, min(most, limits.batch_size + quarter)) if limits.depth == "auto" else depth

    def _give_up(self) -> None:
        assert self.counted >= self.limits.draw_limit, f"gave up after {self.counted} draws: {self.scheduler}"
        self.ran.exhausted = True

    def _check(self) -> None:
        assert_nothing_lost(self.scheduler)
        assert len(self.running) == self.scheduler.num_running <= self.limits.max_running, f"{self.running} run"
        size, most = self.limits.batch_size, self.limits.batch_size * (self.limits.max_staleness + 1)
        assert size <= self.scheduler.depth.value <= most, f"depth beside {size} to {most}: {self.scheduler}"
        assert not self.is_awaited or self.scheduler.may_admit() == self._has_room(), f"held back: {self.scheduler}"

    def _has_room(self) -> bool:
        """Return whether places, bound and draws allow one more group."""
        limits, running = self.limits, len(self.running)
        room = (min(self.published + limits.max_staleness, limits.num_batches - 1) - self.step + 1) * limits.batch_size
        untrained, tried = running + self.scheduler.num_buffered, running + self.counted
        is_place = running < limits.max_running and untrained < room
        return is_place and tried < limits.draw_limit + room - limits.batch_size

    def _finished(self) -> Ran:
        """Assert that each draw has ended and every batch is whole."""
        counts = self.ran.counts = counts_of(self.scheduler)
        if self.ran.exhausted:
            return self.ran
        assert counts["running"] == counts["buffered"] == counts["pending"] == 0, counts
        assert counts["trained"] == self.limits.num_batches * self.limits.batch_size, counts
        for draw, step in trained_by(self.scheduler).items():
            assert draw in self.ran.batches[step - 1], (draw, step)
        for state in (State.FILTERED, State.GIVEN_UP, State.SKIPPED):
            for draw in self.scheduler.in_state(state):
                assert self.schedule.outcome(draw) != KEPT, f"draw {draw} was good and is {state.name}"
        return self.ran


@dataclass(frozen=True)
class Schedule:
    """outcomes: of the draws, over and over. choices: which of the events that are possible happens, over and over;
    -1 is the end of the group that started last, so that others are stragglers.
    kills: after so many events the run is killed, and goes on from its newest checkpoint with `max_running` so large.
    waits: shares of the time from batch to batch that training waits, as the scheduler is told, over and over.
    """

    limits: SchedulerLimits
    publish_every: int
    outcomes: Sequence[str]
    choices: Sequence[int]
    kills: Sequence[tuple[int, int]] = ()
    waits: Sequence[float] = (0.0,)

    def outcome(self, draw: int) -> str:
        return self.outcomes[draw % len(self.outcomes)]


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    batch_size, staleness = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    return SchedulerLimits(
        max_staleness=staleness,
        batch_size=batch_size,
        max_running=draw(st.integers(1, batch_size * (staleness + 1) + 1)),
        order=draw(st.sampled_from(["fifo", "window"])),
        draw_limit=draw(st.sampled_from([batch_size, batch_size + 1, 2 * batch_size, 8 * batch_size])),
        num_batches=draw(st.integers(1, 8)),
        depth=draw(st.one_of(st.sampled_from(["auto", "full"]), st.integers(batch_size, batch_size * (staleness + 1)))),
        at_bound=draw(st.sampled_from(["wait", "wait", "wait", "mask"])),
    )


def outcomes() -> st.SearchStrategy[list[str]]:
    """Draw outcomes, with some usable rows, since a run never ends without them."""
    some = st.sampled_from([KEPT, KEPT, KEPT, FILTERED, QUARANTINED, SKIPPED, UNREADABLE])
    usable = st.lists(st.sampled_from([KEPT, KEPT, FILTERED]), min_size=1, max_size=12)
    mixed = st.lists(some, max_size=12)
    return st.one_of(usable, st.builds(lambda many, rest: [*many, *rest], mixed, usable))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    given = draw(limits())
    return Schedule(
        given,
        publish_every=draw(st.integers(1, given.max_staleness + 1)),
        outcomes=draw(outcomes()),
        choices=draw(st.lists(st.integers(-3, 6), min_size=1, max_size=12)),
        kills=draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, given.max_running)), max_size=2)),
        waits=draw(st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]), min_size=1, max_size=3)),
    )


def random_schedule(seed: int) -> Schedule:
    """Make a schedule with frequent stragglers, full buffers and restarts."""
    rng = random.Random(seed)
    batch_size, staleness = rng.randint(1, 3), rng.randint(0, 2)
    places = rng.randint(1, batch_size * (staleness + 1))
    given = SchedulerLimits(
        staleness,
        batch_size,
        places,
        rng.choice(["fifo", "window"]),
        draw_limit=rng.choice([batch_size, 8 * batch_size]),
        num_batches=rng.randint(2, 8),
        depth=rng.choice(["auto", "full", batch_size]),
    )
    mixed = [KEPT] * 6 + [FILTERED, QUARANTINED, SKIPPED, UNREADABLE]
    return Schedule(
        given,
        publish_every=1,
        outcomes=[KEPT, *rng.choices(mixed, k=rng.randint(0, 8))],
        choices=rng.choices([-1, -1, 0, 0, 1, 2], k=rng.randint(2, 7)),
        kills=[(rng.randint(1, 40), rng.randint(1, places)) for _ in range(rng.randint(0, 2))],
        waits=rng.choices([0.0, 0.2], k=2),
    )
