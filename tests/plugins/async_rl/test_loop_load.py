"""The load of the event loop, and a garbage collector that does not stop it."""

from __future__ import annotations

import gc
import heapq
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from spurline_async_rl.source.load import LoopLoad, QuietCollector
from spurline_async_rl.source.loop_thread import LoopThread

EVERY_S = 0.02


class FakeLoop:
    """An event loop on a clock that is moved by hand: a callback runs when it is due and nothing blocks the loop."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu_s = 3.0
        self.callbacks: list[tuple[float, int, Handle]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> Any:
        handle = Handle(callback)
        heapq.heappush(self.callbacks, (when, id(handle), handle))
        return handle

    @property
    def num_waiting(self) -> int:
        return sum(not handle.cancelled for _, _, handle in self.callbacks)

    def idle(self, seconds: float) -> None:
        """Nothing to do but what is due."""
        until = self.now + seconds
        while self.callbacks and self.callbacks[0][0] <= until:
            when, _, handle = heapq.heappop(self.callbacks)
            self.now = max(self.now, when)
            handle.run()
        self.now = max(self.now, until)

    def block(self, seconds: float, *, computing: bool = True) -> None:
        self.now += seconds
        self.cpu_s += seconds if computing else 0.0


class Handle:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.cancelled = False
        self.callback = callback

    def cancel(self) -> None:
        self.cancelled = True

    def run(self) -> None:
        if not self.cancelled:
            self.callback()


def measured(loop: FakeLoop, tokens: Callable[[], int] = lambda: 0) -> LoopLoad:
    load = LoopLoad(tokens, thread_time=lambda: loop.cpu_s)
    load.start(loop)
    return load


def test_an_idle_loop_lets_nobody_wait() -> None:
    loop = FakeLoop()
    load = measured(loop)
    loop.idle(10)
    metrics = load.take()
    assert metrics["controller/lag_max"] == pytest.approx(0, abs=1e-9)
    assert metrics["controller/cpu_share"] == 0


def test_the_longest_block_is_the_longest_lag() -> None:
    loop = FakeLoop()
    load = measured(loop)
    loop.idle(4.5)
    loop.block(1.0)
    loop.idle(2.0)
    loop.block(0.5)
    loop.idle(2.0)
    metrics = load.take()
    assert metrics["controller/lag_max"] == pytest.approx(1.0, abs=EVERY_S)
    assert metrics["controller/cpu_share"] == pytest.approx(0.15)


def test_a_loop_that_waits_is_not_busy() -> None:
    loop = FakeLoop()
    load = measured(loop)
    loop.block(2.0, computing=False)
    loop.idle(2.0)
    assert load.take()["controller/cpu_share"] == 0


def test_a_block_that_has_just_ended_belongs_to_the_step_that_asks() -> None:
    loop = FakeLoop()
    load = measured(loop)
    loop.idle(1.0)
    loop.block(3.0)
    assert load.take()["controller/lag_max"] == pytest.approx(3.0, abs=EVERY_S)
    loop.idle(1.0)
    assert load.take()["controller/lag_max"] == pytest.approx(0, abs=1e-9), "and to no other"
    assert loop.num_waiting == 1


def test_each_step_has_its_own_tokens_and_seconds() -> None:
    loop = FakeLoop()
    tokens = [500]
    load = measured(loop, tokens=lambda: tokens[0])
    for new, seconds in ((300, 2.0), (0, 1.0), (1_000, 4.0)):
        tokens[0] += new
        loop.idle(seconds)
        assert load.take()["controller/tokens_per_s"] == pytest.approx(new / seconds)


def test_nothing_is_left_on_the_loop_when_it_has_stopped() -> None:
    loop = FakeLoop()
    load = measured(loop)
    loop.idle(1.0)
    load.stop()
    load.stop()
    assert loop.num_waiting == 0
    LoopLoad(lambda: 0).stop()


def test_a_real_loop_that_is_blocked_shows_it() -> None:
    loop = LoopThread("test-loop-load")
    load = LoopLoad(lambda: 0)
    loop.call(load.start)
    loop.call(lambda: time.sleep(0.3))
    metrics = loop.call(load.take)
    assert metrics["controller/lag_max"] >= 0.25
    assert metrics["controller/cpu_share"] < 0.9, "it slept"
    loop.call(load.stop)
    loop.close()


class Node:
    """May refer to itself."""

    def __init__(self) -> None:
        self.itself: Node | None = None


def forget(node: Node) -> weakref.ref[Node]:
    """The only reference to the node is its own."""
    node.itself = node
    return weakref.ref(node)


@pytest.mark.parametrize("attempts", [1, 10_000])
def test_the_collector_is_as_before_after_a_run_and_cycles_of_the_run_are_found(attempts: int) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    collector = QuietCollector(attempts)
    collector.start()
    try:
        collector.start()
        assert gc.get_freeze_count() > before[1]
        assert (gc.get_threshold() == before[0]) == (attempts == 1)
        cycle = forget(Node())
        gc.collect(1)
        gc.collect(1)
        for _ in range(100):
            collector.step()
        assert (cycle() is None) or attempts == 1
    finally:
        collector.close()
        collector.close()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_a_collector_that_is_off_stays_as_it_is() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    gc.disable()
    try:
        collector = QuietCollector(10_000)
        collector.start()
        collector.step()
        collector.close()
        assert (gc.get_threshold(), gc.get_freeze_count()) == before
    finally:
        gc.enable()
