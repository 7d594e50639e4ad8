"""The model of the asynchronous run: promises on a virtual clock, core's synchronous source, the curve over K."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from collected_groups import BAD, EQUAL, LOST, UNREADABLE, VARIED, collect
from every_run import SOAK
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_driver import assert_nothing_lost, counts_of, limits, outcomes

from spurline.errors import RunFailedError
from spurline_async_rl.scheduling.scheduler import SchedulerLimits
from spurline_simulation.model import Model
from spurline_simulation.prediction import figures_of, trained_work
from spurline_simulation.workload import Fate, Times, Workload


@dataclass(frozen=True)
class MadeUp(Workload):
    """A workload that is told the fate of each draw and the time of each step."""

    fates: Callable[[int], Fate] = Fate
    seconds: Callable[[int], float] = float

    def fate(self, draw: int) -> Fate:
        return self.fates(draw)

    def step_s(self, step: int, batch_size: int) -> float:
        return self.seconds(step)


def made_up(fates: Callable[[int], Fate], seconds: Callable[[int], float], **fields: Any) -> MadeUp:
    return MadeUp(Times([1.0]), Times([1.0]), 1, fates=fates, seconds=seconds, **fields)


@dataclass(frozen=True)
class Setup:
    """Arguments of a model."""

    workload: Workload
    limits: SchedulerLimits
    engines: int = 1
    publish_every: int = 1

    def fate(self, draw: int) -> Fate:
        return self.workload.fate(draw)

    def run(self) -> Model:
        return Model(self.workload, self.limits, self.engines, self.publish_every).finish()


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    given = draw(limits())
    seconds = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 100))
    works, kinds = draw(st.lists(seconds, min_size=1, max_size=8)), draw(outcomes())
    trains = draw(st.lists(seconds, min_size=1, max_size=3))

    def fate(number: int) -> Fate:
        kind: Any = kinds[number % len(kinds)]
        outcome = "buffered" if kind == "kept" else kind
        return Fate(works[number % len(works)], outcome)

    workload = made_up(
        fate,
        lambda step: trains[step % len(trains)],
        saturation=draw(st.sampled_from([math.inf, 2])),
        transfer_s=draw(st.sampled_from([0.0, 0.5])),
        pause_s=draw(st.sampled_from([0.0, 0.5])),
    )
    engines, publish_every = draw(st.integers(1, 3)), draw(st.integers(1, given.max_staleness + 1))
    return Setup(workload, given, engines, publish_every)


@pytest.mark.slow
@settings(max_examples=10_000 if SOAK else 150)
@given(setups())
def test_the_bound_holds_and_nothing_is_lost_on_a_virtual_clock(setup: Setup):
    model = Model(setup.workload, setup.limits, setup.engines, setup.publish_every)
    try:
        while model.advance():
            assert_nothing_lost(model.scheduler)
    except RunFailedError:
        assert any(setup.fate(draw).outcome == "quarantined" for draw in range(200))
        return
    given, counts = setup.limits, counts_of(model.scheduler)
    assert counts["trained"] == given.num_batches * given.batch_size
    assert counts["running"] == counts["buffered"] == counts["pending"] == 0
    for step, age, _ in trained_work(model):
        assert age <= given.max_staleness or given.at_bound == "mask", step


@settings(max_examples=60)
@given(setups())
def test_the_work_of_a_group_is_the_sum_of_its_parts_over_versions(setup: Setup):
    try:
        run = setup.run()
    except RunFailedError:
        return
    groups = [group for record in run.records for group in record.groups]
    assert groups
    for group in groups:
        work = run.work[group.draw]
        assert sum(work.values()) == pytest.approx(setup.fate(group.draw).work, abs=1e-6)
        assert (group.oldest, group.newest) == (min(work), max(work))
        assert group.oldest >= group.version


FATES = {"buffered": VARIED, "quarantined": LOST, "skipped": BAD, "unreadable": UNREADABLE}


def synchronous_batches(setup: Setup) -> dict[int, list[int]]:
    """Draws by step, of core's own synchronous collection."""
    batches: dict[int, list[int]] = {}
    first, given = 0, setup.limits
    for step in range(1, given.num_batches + 1):
        collected = collect(
            lambda number: FATES.get(setup.fate(number).outcome, EQUAL),
            first_draw=first,
            count=given.batch_size,
            draw_limit=given.draw_limit,
        )
        first, batches[step] = collected.next_draw, [group.draw for group in collected.groups]
    return batches


def batches(run: Model) -> dict[int, list[int]]:
    return {taken.step: list(taken.draws) for record in run.records for taken in record.taken}


def batches_or_failure(found: Callable[[], dict[int, list[int]]]) -> Any:
    try:
        return found()
    except RunFailedError:
        return "cannot be filled"


@settings(max_examples=2000 if SOAK else 60)
@given(setups())
def test_without_staleness_the_batches_are_those_of_the_synchronous_source(setup: Setup):
    setup = replace(setup, limits=replace(setup.limits, max_staleness=0), publish_every=1)
    expected = batches_or_failure(lambda: synchronous_batches(setup))
    assert batches_or_failure(lambda: batches(setup.run())) == expected


@settings(max_examples=2000 if SOAK else 60)
@given(setups())
def test_fifo_trains_the_batches_of_the_synchronous_source_at_any_staleness_while_draws_last(setup: Setup):
    setup = replace(setup, limits=replace(setup.limits, order="fifo", draw_limit=10_000))
    if any(setup.fate(draw).outcome == "buffered" for draw in range(200)):
        assert batches(setup.run()) == synchronous_batches(setup)


def paced(places: int, order: Any, *, seed: int = 0, steps: int = 100, share: float = 0.0) -> Setup:
    """B = 32, S = 2, lognormal latencies, and as much generation as training capacity."""
    latency = Times([places / 32], 1.0, share, 10.0, seed)
    given = SchedulerLimits(2, 32, places, order, 256, steps)
    return Setup(Workload(latency, Times([1.0]), 32), given)


@pytest.mark.parametrize("order", ["fifo", "window"])
@pytest.mark.parametrize(("places", "least", "most"), [(32, 0.34, 0.48), (8, 0.82, 0.92), (4, 0.94, 0.99)])
def test_fewer_groups_at_the_same_time_wait_less_for_each_other(order: str, places: int, least: float, most: float):
    figures = figures_of(paced(places, order).run())
    assert least < figures.steps_per_second < most
    assert figures.max_staleness == 2
    assert figures.trainer_idle == pytest.approx(1 - figures.steps_per_second, abs=0.02)


def test_overtaking_makes_the_mean_run_faster_and_none_much_slower():
    speeds = [
        [figures_of(paced(8, order, seed=seed, steps=40).run()).steps_per_second for order in ("fifo", "window")]
        for seed in range(12)
    ]
    gains = [window / fifo for fifo, window in speeds]
    assert np.mean(gains) > 1
    assert min(gains) > 0.98


def test_a_pause_stands_between_two_versions_and_nothing_is_generated_in_it():
    workload = made_up(lambda draw: Fate((1.0, 3.0)[draw]), lambda step: 1.0, transfer_s=0.5, pause_s=2.0)
    run = Setup(workload, SchedulerLimits(1, 1, 1, "window", 8, 2)).run()
    spans = [(span.kind, span.began, span.ended) for span in run.records[0].spans]
    assert spans == [("wait", 0, 1), ("train", 1, 2), ("publish", 2, 4.5)]
    assert run.work[1] == {0: 1.5, 1: 1.5}
    (group,) = run.records[1].groups
    assert (group.draw, group.began, group.ended, group.oldest, group.newest) == (1, 1.0, 6.0, 0, 1)
    figures = figures_of(run)
    assert figures.generation_idle == pytest.approx(1 - 4.0 / figures.seconds)
    assert figures.staleness == pytest.approx({0: 2.5 / 4, 1: 1.5 / 4})


def test_engines_get_slower_with_more_groups():
    speed = Workload(Times([1.0]), Times([1.0]), 1, saturation=4).speed
    assert [speed(groups) for groups in (1, 4, 5, 16)] == [1, 1, 0.8, 0.25]
    assert [speed(groups, 2) for groups in (4, 8, 16)] == [1, 1, 0.5]


def test_times_depend_on_the_number_alone_and_have_their_mean():
    base = Times([4.0], 0.5, seed=3)
    straggling = replace(base, late_share=0.1, late_factor=10.0)
    for times in (base, straggling, Times([1.0, 2.0, 6.0], seed=3), Times([2.5])):
        values = [times(number) for number in range(4000)]
        assert [times(number) for number in reversed(range(4000))] == values[::-1]
        assert np.mean(values) == pytest.approx(times.mean, rel=0.1)
    late = [straggling(number) / base(number) for number in range(4000)]
    assert set(np.round(late, 6)) == {1.0, 10.0}
    assert np.mean(np.array(late) > 5) == pytest.approx(0.1, abs=0.02)
