"""Tasks with places and time limits, on a clock that only the test moves."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from virtual_loop import run_virtually

from spurline_concurrency.calls import CANCEL_TIMEOUT_S, Places, TimeLimit
from spurline_rl.protocols.environment import AttemptFailedError

Ending = Literal["returns", "raises", "cancels itself", "clings"]
LIMIT_S = 33.0
MARGIN_S = 1.5
"""More than limits may be late by in a whole example; what is nearer together is not compared."""


@dataclass(frozen=True)
class Plan:
    """How long a job works, and how it ends. One that clings goes on for `clings_s` after it was cancelled.

    limit: its own time limit, or None for that of all.
    """

    works_s: float
    ending: Ending
    clings_s: float = 0.0
    limit: TimeLimit | None = None


async def run(
    places: Places, what: str, work: Callable[[], Coroutine[Any, Any, int]], limit: TimeLimit | None = None
) -> int:
    ended = asyncio.Event()
    call = places.start(what, work, lambda _: ended.set(), limit)
    try:
        await ended.wait()
        return call.result()
    finally:
        await places.end([call], what)


@dataclass
class Seen:
    """What happened, in order."""

    started: list[int] = field(default_factory=list)
    told: dict[int, str] = field(default_factory=dict)
    running: int = 0
    most: int = 0

    async def work(self, number: int, plan: Plan) -> int:
        self.started.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(plan.works_s)
        except asyncio.CancelledError:
            if plan.ending != "clings":
                raise
            await asyncio.sleep(plan.clings_s)
            return number
        finally:
            self.running -= 1
        if plan.ending == "raises":
            raise ValueError(f"from job {number}")
        if plan.ending == "cancels itself":
            raise asyncio.CancelledError
        return number

    async def run(self, places: Places, number: int, plan: Plan) -> None:
        try:
            result = await run(places, f"job {number}", partial(self.work, number, plan), plan.limit)
            self.told[number] = f"result {result}"
        except Exception as error:  # noqa: BLE001 - what the caller is told
            self.told[number] = f"{type(error).__name__}: {error}"


def seconds_down(outages: Sequence[tuple[float, float]], now: float) -> float:
    return sum(max(0.0, min(now, end) - begin) for begin, end in outages)


def limit_of(began: float, left: float, outages: Sequence[tuple[float, float]]) -> float:
    """When so many seconds with an engine have passed, found by going from outage to outage."""
    now = began
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
        limit_s, setting = plan.limit or (LIMIT_S, "the.limit")
        ends, limit = began + plan.works_s, limit_of(began, limit_s, outages)
        assume(abs(ends - limit) > MARGIN_S)
        if ends < limit:
            told[number] = {
                "raises": f"ValueError: from job {number}",
                "cancels itself": f"AttemptFailedError: job {number} was cancelled by its own code.",
            }.get(plan.ending, f"result {number}")
        elif plan.ending == "clings" and plan.clings_s > CANCEL_TIMEOUT_S:
            ends = limit + CANCEL_TIMEOUT_S
            told[number] = (
                f"RunFailedError: job {number} was cancelled, but still runs {CANCEL_TIMEOUT_S:g} s later. An "
                "environment must let asyncio.CancelledError pass."
            )
        else:
            ends = limit + (plan.clings_s if plan.ending == "clings" else 0.0)
            told[number] = f"AttemptFailedError: job {number} did not end within {limit_s:g} s ({setting})."
        heapq.heappush(free, ends)
    return told


async def run_all(plans: Sequence[Plan], count: int, outages: Sequence[tuple[float, float]]) -> Seen:
    loop, seen = asyncio.get_running_loop(), Seen()
    places = Places(count, LIMIT_S, lambda: seconds_down(outages, loop.time()), "the.limit")
    await asyncio.gather(*(seen.run(places, number, plan) for number, plan in enumerate(plans)))
    return seen


works = st.sampled_from([1.0, 7.0, 20.0, 30.0, 38.0, 60.0, 95.0])
endings = st.sampled_from(["returns", "returns", "raises", "cancels itself", "clings"])
limits = st.sampled_from([None, None, (12.0, "own.limit"), (50.0, "other.limit")])
plans = st.builds(Plan, works, endings, st.sampled_from([1.0, 7.0, 20.0, 60.0]), limits)
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


def test_a_call_that_is_cancelled_before_it_has_a_place_does_not_begin():
    async def observe() -> list[int]:
        seen, places = Seen(), Places(1, LIMIT_S, lambda: 0.0, "the.limit")
        calls = [asyncio.ensure_future(seen.run(places, number, Plan(1.0, "returns"))) for number in range(3)]
        await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.wait(calls)
        return seen.started

    assert run_virtually(observe()) == [0, 2]


@pytest.mark.parametrize("clings_s", [5.0, 500.0])
def test_a_cancelled_call_waits_for_its_work_and_names_work_that_goes_on(clings_s: float):
    async def observe() -> tuple[str, int]:
        seen, places = Seen(), Places(1, 1e6, lambda: 0.0, "the.limit")
        call = asyncio.ensure_future(run(places, "job 7", lambda: seen.work(7, Plan(50.0, "clings", clings_s))))
        await asyncio.sleep(1)
        call.cancel()
        [ended] = await asyncio.gather(call, return_exceptions=True)
        return f"{type(ended).__name__}: {ended}", seen.running

    ended, running = run_virtually(observe())
    assert running == (clings_s > CANCEL_TIMEOUT_S)
    assert ended.startswith("RunFailedError: job 7 was cancelled, but still runs 30 s" if running else "CancelledError")


def test_an_error_after_the_time_limit_is_not_told_in_place_of_it():
    async def spiteful() -> int:
        try:
            await asyncio.sleep(1000)
        finally:
            raise ValueError("while it was cancelled")

    places = Places(1, LIMIT_S, lambda: 0.0, "the.limit")
    with pytest.raises(AttemptFailedError, match=r"^job 0 did not end within 33 s \(the\.limit\)\.$"):
        run_virtually(run(places, "job 0", spiteful))
