"""The model of the asynchronous run: promises on a virtual clock, core's synchronous source, the curve over K."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_driver import assert_nothing_lost
from schedules import limits, outcomes

from spurline.config.run_config import DatasetConfig
from spurline.errors import RunFailedError
from spurline.rl.draws import Draw, SkippedRow
from spurline.rl.group_runner import GivenUpPrompt
from spurline.rl.prompt_source import collect_groups
from spurline.rl.trajectory import Group, Trajectory, Turn
from spurline_async_rl.scheduling.scheduler import SchedulerLimits
from spurline_async_rl.simulation.model import Engines, Model, SimulatedRun
from spurline_async_rl.simulation.workload import Fate, Setup, Speed, Times

SOAK = bool(os.environ.get("SPURLINE_SOAK"))


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    given = draw(limits())
    seconds = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 100))
    works, kinds = draw(st.lists(seconds, min_size=1, max_size=8)), draw(outcomes())
    trains = draw(st.lists(seconds, min_size=1, max_size=3))
    retries = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))

    def fate(number: int) -> Fate:
        kind: Any = kinds[number % len(kinds)]
        return Fate(works[number % len(works)], kind, retries[number % len(retries)])

    return Setup(
        given,
        fate,
        lambda step: trains[step % len(trains)],
        engines=draw(st.integers(1, 3)),
        speed=draw(st.sampled_from([Speed(), Speed(((1, 2.0), (8, 0.5)))])),
        publish_every=draw(st.integers(1, given.max_staleness + 1)),
        transfer_s=draw(st.sampled_from([0.0, 0.5])),
        pause_s=draw(st.sampled_from([0.0, 0.5])),
    )


def simulate(setup: Setup) -> SimulatedRun:
    """The asynchronous run from its first draw to its last step."""
    model = Model(setup)
    while model.advance():
        pass
    return model.result()


def run_checked(model: Model, events: int) -> bool:
    """Whether the run came to its end within so many events; after each nothing may be lost."""
    for _ in range(events):
        if not model.advance():
            return True
        assert_nothing_lost(model.scheduler)
    return model.is_over()


@pytest.mark.slow
@settings(max_examples=10_000 if SOAK else 250)
@given(setups(), st.lists(st.integers(0, 60), max_size=3))
def test_the_bound_holds_and_nothing_is_lost_on_a_virtual_clock_with_kills(setup: Setup, kills: list[int]):
    model = Model(setup, keep_checkpoints=True)
    try:
        for events in kills:
            run_checked(model, events)
            model = Model(setup, model.checkpoint, keep_checkpoints=True)
        assert run_checked(model, 20_000)
    except RunFailedError:
        assert any(setup.fate(draw).outcome == "quarantined" for draw in range(200))
        return
    given, counts = setup.limits, model.scheduler.counts()
    assert counts["trained"] == given.num_batches * given.batch_size
    assert counts["running"] == counts["buffered"] == counts["pending"] == 0
    for group in model.result().groups:
        for age in group.ages() if group.step is not None else ():
            masked = group.step is not None and group.step - 1 - age in group.masked
            assert masked == (age > given.max_staleness), group
            assert not masked or given.at_bound == "mask", group


@settings(max_examples=60)
@given(setups())
def test_the_work_of_a_group_is_the_sum_of_its_parts_over_versions(setup: Setup):
    try:
        run = simulate(setup)
    except RunFailedError:
        return
    for group in run.groups:
        if group.ended is not None:
            assert sum(group.parts.values()) == pytest.approx(setup.fate(group.draw).work, abs=1e-6)
            assert min(group.parts) >= group.version


def synchronous_batches(setup: Setup) -> dict[int, list[int]]:
    """Draws by step, of core's own synchronous collection."""

    def take(start: int, count: int) -> list[Draw | SkippedRow]:
        return [
            SkippedRow(f"p@{number}", number, "unreadable")
            if setup.fate(number).outcome == "unreadable"
            else Draw(number, f"p@{number}", DatasetConfig(name="rows"), f"rows:{number}", {})
            for number in range(start, start + count)
        ]

    async def run(draws: Sequence[Draw]) -> list[Any]:
        return [outcome(draw) for draw in draws]

    def outcome(draw: Draw) -> Any:
        kind = setup.fate(draw.number).outcome
        if kind in ("quarantined", "skipped"):
            record = GivenUpPrompt if kind == "quarantined" else SkippedRow
            return record(draw.uid, draw.number, "broken")
        rewards = (0.0, 1.0) if kind == "kept" else (1.0, 1.0)
        turns = [Turn([1], [2], [1], rewards=np.array([reward], np.float32)) for reward in rewards]
        return Group(draw.uid, draw.number, tuple(Trajectory(draw.uid, i, (turn,)) for i, turn in enumerate(turns)))

    batches: dict[int, list[int]] = {}
    first, given = 0, setup.limits
    for step in range(1, given.num_batches + 1):
        collected = asyncio.run(
            collect_groups(
                take,
                run,
                first_draw=first,
                count=given.batch_size,
                draw_limit=given.draw_limit,
                filters=True,
            )
        )
        first, batches[step] = collected.next_draw, [group.draw for group in collected.groups]
    return batches


def batches_or_failure(run: Any, setup: Setup) -> Any:
    try:
        return run(setup)
    except RunFailedError:
        return "cannot be filled"


@settings(max_examples=2000 if SOAK else 60)
@given(setups())
def test_without_staleness_the_batches_are_those_of_the_synchronous_source(setup: Setup):
    setup = replace(setup, limits=replace(setup.limits, max_staleness=0), publish_every=1)
    expected = batches_or_failure(synchronous_batches, setup)
    assert batches_or_failure(lambda it: simulate(it).batches(), setup) == expected


@settings(max_examples=2000 if SOAK else 60)
@given(setups())
def test_fifo_trains_the_batches_of_the_synchronous_source_at_any_staleness_while_draws_last(setup: Setup):
    setup = replace(setup, limits=replace(setup.limits, order="fifo", draw_limit=10_000))
    if any(setup.fate(draw).outcome == "kept" for draw in range(200)):
        assert simulate(setup).batches() == synchronous_batches(setup)


def paced(places: int, order: Any, *, seed: int = 0, steps: int = 100, share: float = 0.0) -> Setup:
    """B = 32, S = 2, lognormal latencies, and as much generation as training capacity."""
    latency = Times([places / 32], 1.0, share, 10.0, seed)
    given = SchedulerLimits(2, 32, places, order, "wait", 256, steps)
    return Setup(given, lambda draw: Fate(latency(draw)), lambda step: 1.0)


@pytest.mark.parametrize("order", ["fifo", "window"])
@pytest.mark.parametrize(("places", "least", "most"), [(32, 0.34, 0.48), (8, 0.82, 0.92), (4, 0.94, 0.99)])
def test_fewer_groups_at_the_same_time_wait_less_for_each_other(order: str, places: int, least: float, most: float):
    figures = simulate(paced(places, order)).figures()
    assert least < figures.steps_per_second < most
    assert figures.max_staleness == 2
    assert figures.trainer_idle == pytest.approx(1 - figures.steps_per_second, abs=0.02)


def test_overtaking_makes_the_mean_run_faster_and_none_much_slower():
    speeds = [
        [simulate(paced(8, order, seed=seed, steps=40)).figures().steps_per_second for order in ("fifo", "window")]
        for seed in range(12)
    ]
    gains = [window / fifo for fifo, window in speeds]
    assert np.mean(gains) > 1
    assert min(gains) > 0.98


def test_a_pause_stands_between_two_versions_and_nothing_is_generated_in_it():
    given = SchedulerLimits(1, 1, 1, "window", "wait", 8, 2)
    run = simulate(Setup(given, lambda draw: Fate((1.0, 3.0)[draw]), lambda step: 1.0, transfer_s=0.5, pause_s=2.0))
    phases = [(span.kind, span.began, span.ended) for span in run.spans]
    assert phases[:4] == [("wait", 0, 1), ("train", 1, 2), ("pause", 2.5, 4.5), ("publish", 2, 4.5)]
    assert run.groups[1].parts == {0: 1.5, 1: 1.5}
    assert (run.groups[1].began, run.groups[1].ended) == (1.0, 6.0)
    figures = run.figures()
    assert figures.generation_paused == pytest.approx(4.0 / run.seconds)
    assert figures.staleness == pytest.approx({0: 2.5 / 4, 1: 1.5 / 4})


def test_engines_get_slower_with_more_groups_and_share_them():
    speed = Speed(((1, 10.0), (3, 6.0)))
    assert [speed.at(groups) for groups in (0, 1, 2, 3, 9)] == [10, 10, 8, 6, 6]
    engines = Engines(2, speed)
    for draw in range(3):
        engines.start(draw, 16.0)
    engines.advance(engines.until_end())
    assert engines.end_next() == 1
    assert engines.until_end() == pytest.approx(16 / 8 - 1.6)


def test_distributions_depend_on_the_number_alone_and_have_their_mean():
    base = Times([4.0], 0.5, seed=3)
    with_late = replace(base, late_share=0.1, late_factor=10.0)
    for times in (base, with_late, Times([1.0, 2.0, 6.0], seed=3), Times([2.5])):
        values = [times(number) for number in range(4000)]
        assert [times(number) for number in reversed(range(4000))] == values[::-1]
        assert np.mean(values) == pytest.approx(times.mean, rel=0.1)
    late = [with_late(number) / base(number) for number in range(4000)]
    assert set(np.round(late, 6)) == {1.0, 10.0}
    assert np.mean(np.array(late) > 5) == pytest.approx(0.1, abs=0.02)
