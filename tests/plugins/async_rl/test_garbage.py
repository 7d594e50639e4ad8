"""The garbage collector in a run: changed while it lasts, as before afterwards, and cycles are found all the same."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spurline_async_rl.source import garbage
from spurline_async_rl.source.garbage import THRESHOLDS, QuietCollector

USUAL = 700, 10, 10


@dataclass
class FakeCollector:
    """As much of `gc` as is used: objects are counted only."""

    thresholds: tuple[int, int, int] = USUAL
    old: int = 100
    frozen: int = 0
    enabled: bool = True
    collected: list[int] = field(default_factory=list)

    def get_threshold(self) -> tuple[int, int, int]:
        return self.thresholds

    def set_threshold(self, *thresholds: int) -> None:
        self.thresholds = thresholds  # type: ignore[assignment]

    def isenabled(self) -> bool:
        return self.enabled

    def get_freeze_count(self) -> int:
        return self.frozen

    def freeze(self) -> None:
        self.frozen, self.old = self.frozen + self.old, 0

    def unfreeze(self) -> None:
        self.frozen, self.old = 0, self.frozen + self.old

    def collect(self, generation: int = 2) -> None:
        self.collected.append(generation)


@pytest.fixture
def fake(monkeypatch):
    def make(**settings):
        collector = FakeCollector(**settings)
        monkeypatch.setattr(garbage, "gc", collector)
        monkeypatch.setattr(garbage, "_PROCESS", garbage._Process())
        return collector

    return make


calls = st.lists(st.tuples(st.sampled_from(["quiet", "tidy", "restore"]), st.integers(0, 2)), min_size=6, max_size=20)


@settings(max_examples=150, deadline=None)
@example([("quiet", 0), ("quiet", 1), ("restore", 0), ("tidy", 1)], True, 0, [1])
@given(calls, st.booleans(), st.sampled_from([0, 50]), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_after_any_runs_beside_each_other_the_collector_is_as_before(calls, enabled, frozen, peaks):
    collector = FakeCollector(enabled=enabled, frozen=frozen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "gc", collector)
        patch.setattr(garbage, "_PROCESS", garbage._Process())
        memory = iter(peaks * 20)
        runs = [QuietCollector(1, peak_memory=lambda: next(memory)) for _ in range(3)]
        quiet: set[int] = set()
        for call, run in calls:
            getattr(runs[run], call)()
            collector.old += 3
            if call == "quiet" and enabled:
                quiet.add(run)
            elif call == "restore":
                quiet.discard(run)
            assert (collector.thresholds[0] == THRESHOLDS[0]) == bool(quiet)
            assert (collector.frozen > frozen) == (bool(quiet) and not frozen)
            if not quiet:
                assert collector.thresholds == USUAL
        for run in runs:
            run.restore()
    assert (collector.thresholds, collector.frozen) == (USUAL, frozen)
    assert collector.collected.count(2) <= len(calls), "nothing is collected at the end"


def test_everything_is_collected_again_only_when_memory_has_grown_by_half_since_it_settled(fake):
    collector = fake()
    memory = iter([10, 30, 90, 100, 134, 136, 200, 205])
    run = QuietCollector(3, peak_memory=lambda: next(memory))
    run.quiet()
    for _ in range(8):
        run.tidy()
    assert collector.collected == [2, 1, 1, 1, 1, 1, 2, 1, 2]
    assert collector.old == 0


def test_thresholds_that_somebody_else_has_set_meanwhile_stay(fake):
    collector = fake()
    run = QuietCollector(1)
    run.quiet()
    collector.set_threshold(5, 5, 5)
    run.restore()
    assert (collector.thresholds, collector.frozen) == ((5, 5, 5), 0)


class Node:
    """May refer to itself."""

    def __init__(self) -> None:
        self.itself: Node | None = None


def forget(node: Node) -> weakref.ref[Node]:
    """The only reference to the node is its own."""
    node.itself = node
    return weakref.ref(node)


def test_cycles_that_were_young_or_frozen_are_found_in_the_end():
    before = gc.get_threshold(), gc.get_freeze_count()
    peak = 1
    run = QuietCollector(1, peak_memory=lambda: peak)
    run.quiet()
    try:
        used = Node()
        young = forget(Node())
        run.tidy()
        assert young() is None
        frozen = forget(used)
        del used
        run.tidy()
        assert frozen() is not None, "it was frozen while it was in use"
        peak = 2
        run.tidy()
        assert frozen() is None
    finally:
        run.restore()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_a_run_of_few_attempts_leaves_alone_only_what_was_there_before() -> None:
    before = gc.get_threshold()
    run = QuietCollector(0, is_rare=False)
    run.quiet()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    count = gc.get_freeze_count()
    run.tidy()
    assert gc.get_freeze_count() == count
    run.restore()
    assert gc.get_freeze_count() == 0
