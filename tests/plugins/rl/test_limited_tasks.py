"""Tasks with places and time limits, on a clock that only the test moves."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from virtual_loop import run_virtually

from spurline.errors import RunFailedError
from spurline_rl.concurrency import CANCEL_TIMEOUT_S
from spurline_rl.limited_tasks import Job, LimitedTasks
from spurline_rl.protocols.environment import AttemptFailedError

Ending = Literal["returns", "raises", "cancels itself", "clings"]
LIMIT_S = 33.0
MARGIN_S = 1.5
"""More than limits may be late by in a whole example; what is nearer together is not compared."""


@dataclass(frozen=True)
class Plan:
    """How long a job works, and how it ends. One that clings goes on for `clings_s` after it was cancelled."""

    works_s: float
    ending: Ending
    clings_s: float = 0.0


@dataclass
class Seen:
    """What happened, in order."""

    started: list[int] = field(default_factory=list)
    told: dict[int, str] = field(default_factory=dict)
    running: int = 0
    most: int = 0


class Planned(Job[int]):
    def __init__(self, number: int, plan: Plan, seen: Seen, all_told: Callable[[], None]) -> None:
        super().__init__()
        self.number, self.plan, self.seen, self.all_told = number, plan, seen, all_told

    is_wanted = True

    @property
    def what(self) -> str:
        return f"job {self.number}"

    def run(self) -> Coroutine[Any, Any, int]:
        self.seen.started.append(self.number)
        return self._work()

    async def _work(self) -> int:
        self.seen.running += 1
        self.seen.most = max(self.seen.most, self.seen.running)
        try:
            await asyncio.sleep(self.plan.works_s)
        except asyncio.CancelledError:
            if self.plan.ending != "clings":
                raise
            await asyncio.sleep(self.plan.clings_s)
            return self.number
        finally:
            self.seen.running -= 1
        if self.plan.ending == "raises":
            raise ValueError(f"from job {self.number}")
        if self.plan.ending == "cancels itself":
            raise asyncio.CancelledError
        return self.number

    def ended(self, result: int | None, error: BaseException | None) -> None:
        assert self.number not in self.seen.told, "told twice"
        self.seen.told[self.number] = f"result {result}" if error is None else f"{type(error).__name__}: {error}"
        self.all_told()


def seconds_down(outages: Sequence[tuple[float, float]], now: float) -> float:
    return sum(max(0.0, min(now, end) - begin) for begin, end in outages)


def limit_of(began: float, outages: Sequence[tuple[float, float]]) -> float:
    """When so many seconds with an engine have passed, found by going from outage to outage."""
    left, now = LIMIT_S, began
    for begin, end in outages:
        if end <= now:
            continue
        if now + left <= begin:
            break
        left -= max(0.0, begin - now)
        now = end
    return now + left


def expected(plans: Sequence[Plan], places: int, outages: Sequence[tuple[float, float]]) -> dict[int, str]:
    """What every job should be told, by taking them one after the other: each begins when the first place is free."""
    free = [0.0] * places
    heapq.heapify(free)
    told: dict[int, str] = {}
    for number, plan in enumerate(plans):
        began = heapq.heappop(free)
        ends, limit = began + plan.works_s, limit_of(began, outages)
        assume(abs(ends - limit) > MARGIN_S)
        if ends < limit:
            told[number] = {
                "raises": f"ValueError: from job {number}",
                "cancels itself": f"AttemptFailedError: job {number} was cancelled from within.",
            }.get(plan.ending, f"result {number}")
        elif plan.ending == "clings" and plan.clings_s > CANCEL_TIMEOUT_S:
            ends = limit + CANCEL_TIMEOUT_S
            told[number] = (
                f"RunFailedError: job {number} was cancelled, but still runs {CANCEL_TIMEOUT_S:g} s later. An "
                "environment must let asyncio.CancelledError pass."
            )
        else:
            ends = limit + (plan.clings_s if plan.ending == "clings" else 0.0)
            told[number] = f"AttemptFailedError: job {number} did not end within {LIMIT_S:g} s (the.limit)."
        heapq.heappush(free, ends)
    return told


async def run_all(plans: Sequence[Plan], places: int, outages: Sequence[tuple[float, float]]) -> Seen:
    loop, seen, over = asyncio.get_running_loop(), Seen(), asyncio.Event()

    def all_told() -> None:
        if len(seen.told) == len(plans):
            over.set()

    tasks = LimitedTasks[int](places, LIMIT_S, lambda: seconds_down(outages, loop.time()), "the.limit")
    for number, plan in enumerate(plans):
        tasks.submit(Planned(number, plan, seen, all_told))
    await asyncio.wait_for(over.wait(), 100_000)
    return seen


works = st.sampled_from([1.0, 7.0, 20.0, 30.0, 38.0, 60.0, 95.0])
endings = st.sampled_from(["returns", "returns", "raises", "cancels itself", "clings"])
plans = st.builds(Plan, works, endings, st.sampled_from([1.0, 7.0, 20.0, 60.0]))
gaps = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 50)), max_size=3)


@settings(max_examples=150, deadline=None)
@given(st.lists(plans, min_size=1, max_size=8), st.integers(1, 4), gaps)
def test_every_job_gets_its_place_its_time_and_its_own_end(jobs, places, breaks):
    outages, now = [], 0.0
    for gap, length in breaks:
        outages.append((now + gap, now + gap + length))
        now += gap + length
    told = expected(jobs, places, outages)
    seen = run_virtually(run_all(jobs, places, outages))
    assert seen.told == told
    assert seen.started == sorted(seen.started), "in the order in which they were submitted"
    # A job that goes on for good has lost its place.
    if not any("still runs" in text for text in told.values()):
        assert seen.most == min(places, len(jobs))


def test_jobs_that_nobody_wants_any_more_do_not_begin():
    async def observe() -> list[int]:
        seen, tasks = Seen(), LimitedTasks[int](1, LIMIT_S, lambda: 0.0, "the.limit")
        jobs = [Planned(number, Plan(1.0, "returns"), seen, lambda: None) for number in range(3)]
        jobs[1].is_wanted = False
        for job in jobs:
            tasks.submit(job)
        await asyncio.sleep(10)
        return seen.started

    assert run_virtually(observe()) == [0, 2]


def test_ending_jobs_waits_for_them_and_names_one_that_goes_on():
    async def observe() -> None:
        seen, tasks = Seen(), LimitedTasks[int](5, 1e6, lambda: 0.0, "the.limit")
        works = [Plan(50.0, "returns"), Plan(50.0, "clings", 5.0), Plan(50.0, "clings", 500.0)]
        jobs = [Planned(number, plan, seen, lambda: None) for number, plan in enumerate(works)]
        for job in jobs:
            tasks.submit(job)
        await asyncio.sleep(1)
        await tasks.end(jobs[:2])
        assert seen.running == 1
        with pytest.raises(RunFailedError, match="job 2 was cancelled, but still runs 30 s later"):
            await tasks.end(jobs)

    run_virtually(observe())


def test_an_error_after_the_time_limit_is_not_told_in_place_of_it():
    class Spiteful(Planned):
        async def _work(self) -> int:
            try:
                await asyncio.sleep(1000)
            finally:
                raise ValueError("while it was cancelled")

    async def observe() -> str:
        seen, tasks = Seen(), LimitedTasks[int](1, LIMIT_S, lambda: 0.0, "the.limit")
        tasks.submit(Spiteful(0, Plan(0.0, "returns"), seen, lambda: None))
        await asyncio.sleep(100)
        return seen.told[0]

    assert run_virtually(observe()) == f"{AttemptFailedError.__name__}: job 0 did not end within 33 s (the.limit)."
