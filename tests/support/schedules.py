"""Schedules of a run in which anything that may happen next can: groups end in any order, workers start late, kills."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from spurline_async_rl.scheduling.scheduler import SchedulerLimits

KEPT, FILTERED, QUARANTINED, SKIPPED, UNREADABLE = "kept", "filtered", "quarantined", "skipped", "unreadable"


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
        at_bound=draw(st.sampled_from(["wait", "wait", "wait", "mask"])),
        draw_limit=draw(st.sampled_from([batch_size, batch_size + 1, 2 * batch_size, 8 * batch_size])),
        num_batches=draw(st.integers(1, 8)),
        depth=draw(st.one_of(st.sampled_from(["auto", "full"]), st.integers(batch_size, batch_size * (staleness + 1)))),
    )


def outcomes() -> st.SearchStrategy[list[str]]:
    """Not all of them rows that cannot be used: of these there is no end."""
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
    """One in which stragglers, full buffers and restarts are frequent: made to find errors, and fast."""
    rng = random.Random(seed)
    batch_size, staleness = rng.randint(1, 3), rng.randint(0, 2)
    places = rng.randint(1, batch_size * (staleness + 1))
    given = SchedulerLimits(
        staleness,
        batch_size,
        places,
        rng.choice(["fifo", "window"]),
        "wait",
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
