"""The producer on a real event loop: batches, failures, and checkpoints at every moment, with scripted groups."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_driver import counts_of, trained_by

from spurline.config.run_config import DatasetConfig
from spurline.errors import DataError, RunFailedError
from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits, State
from spurline_async_rl.source import producer as producer_module
from spurline_async_rl.source.producer import Producer
from spurline_async_rl.source.recordings import groups_state
from spurline_async_rl.timeline.records import Timeline
from spurline_rl.draws import Draw, SkippedRow
from spurline_rl.group_runner import GivenUpPrompt, Outcome
from spurline_rl.trajectory import Group, Trajectory, Turn, turns_of

KEPT, EQUAL, GIVEN_UP, BAD_ROW, UNREADABLE, BROKEN = "kept", "equal", "given up", "bad row", "unreadable", "broken"


@dataclass
class ScriptedGroups:
    """What becomes of each draw, and after how many turns of the event loop; what lies beyond is kept at once."""

    fates: Sequence[str] = ()
    delays: Sequence[int] = ()
    version: int = 0
    engine: str = "engine 0"
    skipped: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)

    def fate(self, number: int) -> str:
        return self.fates[number] if number < len(self.fates) else KEPT

    def take(self, start: int, count: int) -> Sequence[Draw | SkippedRow]:
        assert count == 1
        uid = f"rows:{start}@{start}"
        if self.fate(start) == UNREADABLE:
            return [SkippedRow(uid, start, "not JSON")]
        return [Draw(start, uid, DatasetConfig(name="rows"), f"rows:{start}", {})]

    def skip(self, row: SkippedRow) -> None:
        self.skipped.append(row.draw)

    async def run_group(self, prompt: Draw) -> Outcome:
        version = self.version
        self.started.append(prompt.number)
        for _ in range(self.delays[prompt.number] if prompt.number < len(self.delays) else 0):
            await asyncio.sleep(0)
        fate = self.fate(prompt.number)
        if fate == BROKEN:
            raise DataError("row 3 is broken")
        if fate == GIVEN_UP:
            return GivenUpPrompt(prompt.uid, prompt.number, "it failed")
        if fate == BAD_ROW:
            return SkippedRow(prompt.uid, prompt.number, "no prompt")
        return scored_group(prompt, [1.0, 1.0] if fate == EQUAL else [0.0, 1.0], version, self.engine)

    def take_retries(self, uid: str) -> int:
        return int(uid.rpartition("@")[2]) % 3


def scored_group(prompt: Draw, rewards: Sequence[float], version: int, engine: str) -> Group:
    return Group(
        prompt.uid,
        prompt.number,
        tuple(
            Trajectory(
                prompt.uid,
                sample,
                (
                    Turn(
                        np.array([1]),
                        np.array([2]),
                        np.array([1]),
                        versions=np.array([version]),
                        rewards=[reward],
                        engines=(engine,),
                    ),
                ),
            )
            for sample, reward in enumerate(rewards)
        ),
    )


def limits(**changes: Any) -> SchedulerLimits:
    given_limits = {
        "max_staleness": 1,
        "batch_size": 2,
        "max_running": 2,
        "order": "window",
        "draw_limit": 16,
        "num_batches": 4,
    }
    return SchedulerLimits(**(given_limits | changes))


def make_producer(groups: Any, changed: asyncio.Event, given_limits: SchedulerLimits, **settings: Any) -> Producer:
    timeline = Timeline(Path("timeline.jsonl"))
    return Producer(groups, groups, Scheduler(given_limits), timeline, filters=True, notify=changed.set, **settings)


async def next_groups(producer: Producer, changed: asyncio.Event, step: int) -> tuple[Any, int]:
    while True:
        changed.clear()
        taken = producer.take(step)
        if taken is not None:
            return taken
        await asyncio.wait_for(changed.wait(), 20)


async def train(groups: ScriptedGroups, given_limits: SchedulerLimits, checkpoints: Sequence[bool]) -> Producer:
    """All steps; where `checkpoints` says so the producer is dropped after the step, as by a kill, and a new one goes
    on with what its checkpoint holds."""
    changed = asyncio.Event()
    producer = make_producer(groups, changed, given_limits)
    producer.start()
    for step in range(1, given_limits.num_batches + 1):
        collected, _ = await next_groups(producer, changed, step)
        assert len(collected.groups) == given_limits.batch_size
        assert [group.draw for group in collected.groups] == sorted(group.draw for group in collected.groups)
        for group in collected.groups:
            version = int(group.trajectories[0].turns[0].versions[0])
            assert 0 <= step - 1 - version <= given_limits.max_staleness
        groups.version = step
        producer.publish(step)
        await asyncio.sleep(0)
        if checkpoints[step % len(checkpoints)]:
            state, kept = producer.snapshot()
            json.dumps({name: part for name, part in state.items() if name != "ledger"})
            state["groups"] = groups_state(kept)
            await producer.close()
            producer = make_producer(groups, changed, given_limits)
            producer.load_state_dict(state)
            assert (producer.scheduler.taken, producer.scheduler.version) == (step, step)
            producer.start()
    await producer.close()
    return producer


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([KEPT, KEPT, KEPT, EQUAL, GIVEN_UP, BAD_ROW, UNREADABLE]), max_size=20),
    st.lists(st.integers(0, 12), max_size=20),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.sampled_from(["fifo", "window"]),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_every_prompt_ends_once_and_every_step_gets_its_groups_whatever_is_killed_when(
    fates: list[str], delays: list[int], checkpoints: list[bool], order: Any, staleness: int, running: int
) -> None:
    given_limits = limits(order=order, max_staleness=staleness, max_running=running)
    groups = ScriptedGroups(fates, delays)
    producer = asyncio.run(asyncio.wait_for(train(groups, given_limits, checkpoints), 60))
    scheduler = producer.scheduler
    trained = trained_by(scheduler)
    assert Counter(trained.values()) == dict.fromkeys(range(1, 5), given_limits.batch_size)
    counts = counts_of(scheduler)
    assert (counts["pending"], counts["running"], counts["buffered"]) == (0, 0, 0)
    filled_up = {draw for draw in trained if groups.fate(draw) == EQUAL}
    for draw in range(scheduler.num_drawn):
        expected = {EQUAL: State.FILTERED, GIVEN_UP: State.GIVEN_UP}.get(groups.fate(draw), State.SKIPPED)
        if groups.fate(draw) == KEPT or draw in filled_up:
            assert draw in trained
        else:
            assert draw in scheduler.in_state(expected)
    assert not filled_up, "the limit of draws was not reached, so nothing filtered may be trained on"


def test_a_step_comes_with_what_it_cost() -> None:
    groups = ScriptedGroups([KEPT, EQUAL, UNREADABLE, GIVEN_UP, BAD_ROW, KEPT])

    async def first() -> Any:
        changed = asyncio.Event()
        producer = make_producer(groups, changed, limits(max_staleness=0))
        producer.start()
        return await next_groups(producer, changed, 1)

    collected, retries = asyncio.run(first())
    assert [group.draw for group in collected.groups] == [0, 5]
    assert [group.draw for group in collected.every] == [0, 1, 5]
    assert (len(collected.given_up), collected.skipped, collected.refill_missing) == (1, 2, 0)
    assert retries == sum(draw % 3 for draw in (0, 1, 3, 4, 5))
    assert collected.next_draw == 6


def test_a_step_that_cannot_be_filled_ends_the_run_with_the_limit() -> None:
    groups = ScriptedGroups([GIVEN_UP, GIVEN_UP, GIVEN_UP, KEPT])

    async def first() -> Any:
        changed = asyncio.Event()
        producer = make_producer(groups, changed, limits(max_staleness=0, draw_limit=4))
        producer.start()
        return await next_groups(producer, changed, 1)

    with pytest.raises(RunFailedError, match=r"(?s)drew 4 prompts and 3 of them were given up.*\n- it failed"):
        asyncio.run(first())


@pytest.mark.parametrize("fates", [[KEPT] * 3, [KEPT, KEPT, EQUAL]])
def test_groups_with_tokens_of_an_unproven_version_wait_and_so_do_filtered_ones(fates: list[str]) -> None:
    async def main() -> None:
        changed, groups = asyncio.Event(), ScriptedGroups(fates, delays=[0, 0, 0, 50])
        producer = make_producer(groups, changed, limits(max_running=4, depth="auto"))
        producer.start()
        depth = producer.scheduler.depth.value
        await asyncio.sleep(0.1)
        assert producer.take(1, unproven=0) is None
        await asyncio.sleep(0.1)
        assert producer.take(1, seconds=0.2, unproven=1) is not None
        # More depth would not make a proof faster.
        assert producer.scheduler.depth.value <= depth
        await producer.close()

    asyncio.run(main())


def test_an_engine_that_was_distrusted_is_trusted_with_what_it_makes_after_its_proof() -> None:
    async def main() -> None:
        changed, groups = asyncio.Event(), ScriptedGroups()
        producer = make_producer(groups, changed, limits())
        producer.start()
        await asyncio.sleep(0.1)
        producer.distrust("engine 0", -1)
        await asyncio.sleep(0.1)
        assert producer.take_given_back() >= 2
        assert producer.take(1) is None
        draw, skipped = groups.take(0, 1)[0], SkippedRow("rows:9@9", 9, "not JSON")
        assert producer.tainted([skipped, scored_group(draw, [0.0], 0, "engine 0")]) == [1]  # type: ignore[arg-type]
        groups.version = 1
        producer.trust("engine 0", 1)
        collected, _ = await next_groups(producer, changed, 1)
        assert {int(turn.versions[0]) for turn in turns_of(collected.groups)} == {1}  # type: ignore[index]
        await producer.close()

    asyncio.run(main())


def test_closing_leaves_no_task_behind() -> None:
    async def start_and_close() -> int:
        producer = make_producer(ScriptedGroups(delays=[10**9] * 9), asyncio.Event(), limits())
        producer.start()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 3
        await producer.close()
        return len(asyncio.all_tasks())

    assert asyncio.run(start_and_close()) == 1


def test_finished_groups_are_made_ready_on_a_thread_that_ends_with_the_producer() -> None:
    threads: set[threading.Thread] = set()

    def ready(group: Group) -> Group:
        threads.add(threading.current_thread())
        return replace(group, columns={"ready": group.draw})

    async def first() -> Any:
        changed = asyncio.Event()
        producer = make_producer(ScriptedGroups(), changed, limits(), ready=ready)
        producer.start()
        collected, _ = await next_groups(producer, changed, 1)
        await producer.close()
        return producer, collected

    # The thread must end although the producer is still there.
    producer, collected = asyncio.run(first())
    assert producer.scheduler.taken == 1
    assert [group.columns for group in collected.groups] == [{"ready": 0}, {"ready": 1}]
    [thread] = threads
    assert thread is not threading.main_thread()
    assert not thread.is_alive()


@pytest.mark.parametrize(("fates", "said"), [([KEPT, BROKEN], "row 3 is broken"), ([KEPT], "sum up to nan")])
def test_an_error_of_one_group_or_of_what_makes_it_ready_reaches_the_training_thread(
    fates: list[str], said: str
) -> None:
    def ready(group: Group) -> Group:
        if BROKEN in fates:
            return group
        raise DataError(f"the rewards of draw {group.draw} sum up to nan")

    async def first() -> Any:
        changed = asyncio.Event()
        producer = make_producer(ScriptedGroups(fates), changed, limits(), ready=ready)
        producer.start()
        try:
            return await next_groups(producer, changed, 1)
        finally:
            await producer.close()

    with pytest.raises(DataError, match=said):
        asyncio.run(first())


def test_a_publish_that_lets_many_groups_start_leaves_room_for_others_between_them(monkeypatch):
    monkeypatch.setattr(producer_module, "_ADMITTED_AT_ONCE", 3)

    async def observe() -> list[int]:
        groups = ScriptedGroups(delays=[1000] * 20)
        producer = make_producer(groups, asyncio.Event(), limits(batch_size=10, max_running=20))
        producer.start()
        # What calls again meanwhile does not make it faster.
        producer.publish(0)
        levels = [producer.scheduler.num_running]
        while levels[-1] < 20:
            await asyncio.sleep(0)
            levels.append(producer.scheduler.num_running)
        await producer.close()
        return levels

    levels = asyncio.run(asyncio.wait_for(observe(), 30))
    assert levels[0] == 6
    assert all(after - before <= 3 for before, after in pairwise(levels))
